"""The continuation index: past outputs as a source of proposed tokens to verify.

```
 log       # t h e _ c a t _ s a t # o n _ t h e _ m a t #      a ring of tokens; # closes each output
 heads     bucket of (h, e, _) -> 18 --+                        the newest place after three such tokens
 earlier                     18 -> 4 <-+                        the place before that one, and so on
```
The three arrays of LZ77 (as in zlib's deflate) replace a suffix tree: 20 bytes a token instead of hundreds, one step
per added token without a dictionary, and eviction by overwriting. The places found are compared token by token. Those
whose past agrees longest with the context vote on the next token, as the counts of a suffix tree's node would
(SuffixDecoding, arXiv:2411.04975). A proposal changes no answer, because proposed tokens are verified.

One index belongs to one scope (tenant, model, adapter): see `core.cache.partial.scoped_indexes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

GRAM = 3
"""Tokens that must agree before a place is compared."""

CANDIDATES = 8
"""The most places that vote, newest first: bounds the cost of a proposal."""

STEPS = 16
"""The most places of a bucket examined, including those of other tokens in the same bucket."""

LENGTHS = (64, 32, 16, 8, 4)
"""Agreement with the context is measured in these lengths; shorter agreement counts as `GRAM`."""

SAMPLE = 16
"""One in this many added tokens is proposed first, to learn how often votes are right."""

FLOOR = 0.1
"""A proposal ends where the chance that all of it is right falls below this: verifying more would not pay."""

END = 0xFFFFFFFF
"""Closes an output in the log; no token has this id."""

SMALLEST = 1 << 12
"""Initial size of a log in tokens; it doubles as long as memory allows."""

BYTES_PER_TOKEN = 4 + 8 + 8
"""A token, its place's predecessor, and its bucket's head."""


class Proposal(NamedTuple):
    """Tokens that may come next.

    ``probabilities[i]`` estimates the chance that ``tokens[i]`` is right if all tokens before it are. ``agreed`` is
    the least number of context tokens that the places behind the proposal agree with.
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    agreed: int


NOTHING = Proposal((), (), 0)


class ContinuationIndex:
    """An index over the newest outputs of one scope.

    It starts small and doubles while memory allows. From the first output on for which it may not grow, it keeps its
    size and overwrites its oldest outputs.
    """

    def __init__(self) -> None:
        self._size = SMALLEST
        self._log = array("I", bytes(4 * SMALLEST))
        self._heads = array("q", [-1]) * SMALLEST
        self._earlier = array("q", [-1]) * SMALLEST
        self._end = 0  # places written so far; a place's slot is its remainder by the size
        self._trust = _Trust()
        self.outputs = 0

    @property
    def nbytes(self) -> int:
        """Memory of the three arrays, the only parts that grow."""
        return self._size * BYTES_PER_TOKEN

    @property
    def tokens(self) -> int:
        """Tokens in the log, including the marks between outputs."""
        return min(self._end, self._size)

    def add(
        self, output: Sequence[int], lead: Sequence[int] = (), *, goes_on: bool = False, max_bytes: int
    ) -> None:
        """Add one output or a part of it; ``lead`` are the last tokens before it, of the prompt or of the last part.

        It ``goes_on`` if the last call added the part before. The index may use up to ``max_bytes`` for it, and never
        less than its initial size.
        """
        tokens = (*lead[-GRAM:], *output)
        # After places have been reused, doubling would change their slots.
        while self._end <= self._size < self._end + len(tokens) + 1 and 2 * self.nbytes <= max_bytes:
            self._double()
        again = len(tokens) - len(output) + 1  # the lead, and the mark that closes the last part
        if goes_on and again <= self._end % self._size <= self._size - len(output):
            self._end -= again
        most = self._size // 2
        for start in range(0, len(tokens), most):
            self._write(tokens[max(0, start - GRAM) : start + most])
        self.outputs += not goes_on

    def _double(self) -> None:
        """Double the size; each bucket becomes two with the same places, which are compared in any case."""
        self._log.extend(array("I", bytes(4 * self._size)))
        self._earlier.extend(array("q", [-1]) * self._size)
        self._heads.extend(self._heads)
        self._size *= 2

    def _write(self, tokens: tuple[int, ...]) -> None:
        size, log = self._size, self._log
        self._learn(tokens)
        if (self._end % size) + len(tokens) + 1 > size:  # an output never wraps, so that slices stay whole
            rest = size - self._end % size
            log[self._end % size :] = array("I", [END]) * rest
            self._end += rest
        first = self._end
        slot = first % size
        log[slot : slot + len(tokens) + 1] = array("I", (*tokens, END))
        self._end = first + len(tokens) + 1
        heads, earlier, mask = self._heads, self._earlier, size - 1
        grams = zip(tokens, tokens[1:], tokens[2:-1], strict=False)
        for place, gram in enumerate(grams, first + GRAM):
            bucket = hash(gram) & mask
            earlier[place & mask] = heads[bucket]
            heads[bucket] = place

    def _learn(self, tokens: tuple[int, ...]) -> None:
        """Record how votes on the tokens of this output would have gone, before it is in the log."""
        for at in range(GRAM + self.outputs % SAMPLE, len(tokens), SAMPLE):  # vary the positions
            past = array("I", tokens[max(0, at - LENGTHS[0]) : at])
            votes = self._votes(past)
            if votes.places:
                leader, standing = next(_led([self._log[place : place + 1] for place in votes.places]))
                if leader != END:
                    self._trust.learn(votes.agreed, standing, leader == tokens[at])

    def propose(self, context: Sequence[int], max_tokens: int) -> Proposal:
        """Up to ``max_tokens`` tokens that may follow ``context``, of which the last `LENGTHS`[0] tokens count."""
        votes = self._votes(array("I", context[-LENGTHS[0] :]))
        if not votes.places or max_tokens < 1:
            return NOTHING
        log = self._log
        ahead = [log[place : place + max_tokens] for place in votes.places]
        tokens: list[int] = []
        probabilities: list[float] = []
        chance, agreed, estimates = 1.0, votes.agreed, self._trust.estimates
        for token, standing in _led(ahead):
            probability = estimates[_ROWS[agreed]][standing]
            chance *= probability
            if token == END or chance < FLOOR:
                break
            tokens.append(token)
            probabilities.append(probability)
            agreed = min(agreed + 1, LENGTHS[0])
        return Proposal(tuple(tokens), tuple(probabilities), votes.agreed)

    def _votes(self, past: array[int]) -> _Votes:
        """The slots after the places that agree longest with ``past``, newest first."""
        if len(past) < GRAM:
            return _NO_VOTES
        log, earlier, mask = self._log, self._earlier, self._size - 1
        oldest = max(GRAM, self._end - self._size)
        gram = past[-GRAM:]
        place = self._heads[hash(tuple(gram)) & mask]
        found: list[int] = []
        for _ in range(STEPS):
            if place < oldest:
                break
            slot = place & mask
            if log[slot - GRAM : slot] == gram:
                found.append(slot)
                if len(found) == CANDIDATES:
                    break
            place = earlier[slot]
        agreed, count = GRAM, len(past)
        for length in _SHORTEST_FIRST:
            if length > count or not found:
                break
            tail = past[-length:]
            agreeing = [slot for slot in found if log[slot - length : slot] == tail]
            if not agreeing:
                break
            found, agreed = agreeing, length
        return _Votes(tuple(found), agreed)


class _Votes(NamedTuple):
    places: tuple[int, ...]
    agreed: int


_NO_VOTES = _Votes((), 0)
_SHORTEST_FIRST = LENGTHS[::-1]


def _led(ahead: list[array[int]]) -> Iterator[tuple[int, int]]:
    """The leading token at each place of the runs, and its standing; runs with another token vote no more."""
    at = 0
    while True:
        for ballots in zip(*ahead, strict=False):
            leader, votes = _leader(ballots)
            at += 1
            if votes < len(ballots):
                yield leader, 2 if 2 * votes >= len(ballots) else 3
                break
            yield leader, votes > 1
        else:
            return
        ahead = [run[at:] for run in ahead if run[at - 1] == leader]
        at = 0


def _leader(ballots: Sequence[int]) -> tuple[int, int]:
    """The token with most votes, and their number; of equals the first one, which is the newest."""
    first = ballots[0]
    votes = ballots.count(first)
    if 2 * votes >= len(ballots):
        return first, votes
    leader = max(dict.fromkeys(ballots), key=ballots.count)
    return leader, ballots.count(leader)


class _Trust:
    """How often votes were right, by the length of their agreement with the context and by the leader's standing:
    one place alone; several that all agree; a majority; fewer than half.

    Each cell starts with the estimate of PPM's method C (Moffat, 1990), weighted as two observations.
    """

    def __init__(self) -> None:
        self._right = [[2.0 * prior for prior in _PRIORS] for _ in range(len(LENGTHS) + 1)]
        self._seen = [[2.0] * len(_PRIORS) for _ in range(len(LENGTHS) + 1)]
        self.estimates = [list(_PRIORS) for _ in range(len(LENGTHS) + 1)]

    def learn(self, agreed: int, standing: int, right: bool) -> None:
        row = _ROWS[agreed]
        self._right[row][standing] += right
        self._seen[row][standing] += 1
        self.estimates[row][standing] = self._right[row][standing] / self._seen[row][standing]


_PRIORS = (1 / 2, 4 / 5, 1 / 2, 1 / 4)

_ROWS = tuple(sum(agreed < length for length in LENGTHS) for agreed in range(LENGTHS[0] + 1))
"""The row of each agreement; a longer one counts as the longest."""
