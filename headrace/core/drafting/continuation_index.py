"""The continuation index: past outputs as a source of proposed tokens.

```
 log       # t h e _ c a t _ s a t # o n _ t h e _ m a t #      a ring of tokens; # closes each output
 heads     bucket of (h, e, _) -> 18 --+                        the newest position after three such tokens
 earlier                     18 -> 4 <-+                        the position before that one, and so on
```
The three arrays of LZ77 (as in zlib's deflate) replace a suffix tree: 20 bytes a token instead of hundreds, one step
per added token without a dictionary, and eviction by overwriting. The positions found are compared token by token.
Those with the longest match with the context vote on the next token, as the counts of a suffix tree's node would
(SuffixDecoding, arXiv:2411.04975). A proposal changes no answer, because proposed tokens are verified.

One index belongs to one scope (tenant, model, adapter): see `core.drafting.scoped_indexes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MIN_MATCH = 3
"""Tokens that must match before a position is compared."""

CANDIDATES = 8
"""Maximum number of positions that vote, newest first; it bounds the cost of a proposal."""

MAX_STEPS = 16
"""Maximum number of positions of a bucket examined, including those of other tokens in the same bucket."""

LENGTHS = (64, 32, 16, 8, 4)
"""Matches with the context are measured in these lengths; shorter ones count as `MIN_MATCH`."""

SAMPLE = 16
"""One in this many added tokens is proposed first, to learn how often votes are right."""

MIN_SURVIVAL = 0.1
"""A proposal ends where the probability that all of it is accepted falls below this, because more would not pay."""

SEPARATOR = 0xFFFFFFFF
"""Closes an output in the log; no token has this id."""

INITIAL_TOKENS = 1 << 12
"""Initial size of a log in tokens; it doubles as long as memory allows."""

BYTES_PER_TOKEN = 4 + 8 + 8
"""A token, its position's predecessor, and its bucket's head."""


class Proposal(NamedTuple):
    """Tokens that may come next.

    ``probabilities[i]`` estimates the probability that ``tokens[i]`` is accepted if all tokens before it are.
    ``matched`` is the number of context tokens that the positions behind the proposal match, at least.
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    matched: int


NO_PROPOSAL = Proposal((), (), 0)


class ContinuationIndex:
    """An index over the newest outputs of one scope.

    It starts small and doubles while memory allows. From the first output on for which it may not grow, it keeps its
    size and overwrites its oldest outputs.
    """

    def __init__(self) -> None:
        self._size = INITIAL_TOKENS
        self._log = array("I", bytes(4 * INITIAL_TOKENS))
        self._heads = array("q", [-1]) * INITIAL_TOKENS
        self._earlier = array("q", [-1]) * INITIAL_TOKENS
        self._end = 0  # positions written so far; the slot of a position is its remainder by the size
        self._accuracy = _VoteAccuracy()
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
        self, output: Sequence[int], lead: Sequence[int] = (), *, continued: bool = False, max_bytes: int
    ) -> None:
        """Add one output or a part of it; ``lead`` are the last tokens before it, of the prompt or of the last part.

        It ``continued`` if the last call added the part before. The index may use up to ``max_bytes`` for it, and never
        less than its initial size.
        """
        tokens = (*lead[-MIN_MATCH:], *output)
        # After positions have been reused, doubling would change their slots.
        while self._end <= self._size < self._end + len(tokens) + 1 and 2 * self.nbytes <= max_bytes:
            self._double()
        again = len(tokens) - len(output) + 1  # the lead, and the mark that closes the last part
        if continued and again <= self._end % self._size <= self._size - len(output):
            self._end -= again
        most = self._size // 2
        for start in range(0, len(tokens), most):
            self._write(tokens[max(0, start - MIN_MATCH) : start + most])
        self.outputs += not continued

    def _double(self) -> None:
        """Double the size; each bucket becomes two with the same positions, which are compared in any case."""
        self._log.extend(array("I", bytes(4 * self._size)))
        self._earlier.extend(array("q", [-1]) * self._size)
        self._heads.extend(self._heads)
        self._size *= 2

    def _write(self, tokens: tuple[int, ...]) -> None:
        size, log = self._size, self._log
        self._learn(tokens)
        if (self._end % size) + len(tokens) + 1 > size:  # an output never wraps, so that slices stay whole
            rest = size - self._end % size
            log[self._end % size :] = array("I", [SEPARATOR]) * rest
            self._end += rest
        first = self._end
        slot = first % size
        log[slot : slot + len(tokens) + 1] = array("I", (*tokens, SEPARATOR))
        self._end = first + len(tokens) + 1
        heads, earlier, mask = self._heads, self._earlier, size - 1
        grams = zip(tokens, tokens[1:], tokens[2:-1], strict=False)
        for position, gram in enumerate(grams, first + MIN_MATCH):
            bucket = hash(gram) & mask
            earlier[position & mask] = heads[bucket]
            heads[bucket] = position

    def _learn(self, tokens: tuple[int, ...]) -> None:
        """Record how votes on the tokens of this output would have gone, before it is in the log."""
        for at in range(MIN_MATCH + self.outputs % SAMPLE, len(tokens), SAMPLE):  # vary the positions
            past = array("I", tokens[max(0, at - LENGTHS[0]) : at])
            votes = self._votes(past)
            if votes.positions:
                leader, support = next(
                    _majorities([self._log[position : position + 1] for position in votes.positions])
                )
                if leader != SEPARATOR:
                    self._accuracy.learn(votes.matched, support, leader == tokens[at])

    def propose(self, context: Sequence[int], max_tokens: int) -> Proposal:
        """Up to ``max_tokens`` tokens that may follow ``context``, of which the last `LENGTHS`[0] tokens count."""
        votes = self._votes(array("I", context[-LENGTHS[0] :]))
        if not votes.positions or max_tokens < 1:
            return NO_PROPOSAL
        log = self._log
        ahead = [log[position : position + max_tokens] for position in votes.positions]
        tokens: list[int] = []
        probabilities: list[float] = []
        survival, matched, estimates = 1.0, votes.matched, self._accuracy.estimates
        for token, support in _majorities(ahead):
            probability = estimates[_ROWS[matched]][support]
            survival *= probability
            if token == SEPARATOR or survival < MIN_SURVIVAL:
                break
            tokens.append(token)
            probabilities.append(probability)
            matched = min(matched + 1, LENGTHS[0])
        return Proposal(tuple(tokens), tuple(probabilities), votes.matched)

    def _votes(self, past: array[int]) -> _Votes:
        """The slots after the longest matches with ``past``, newest first."""
        if len(past) < MIN_MATCH:
            return _NO_VOTES
        log, earlier, mask = self._log, self._earlier, self._size - 1
        oldest = max(MIN_MATCH, self._end - self._size)
        gram = past[-MIN_MATCH:]
        position = self._heads[hash(tuple(gram)) & mask]
        found: list[int] = []
        for _ in range(MAX_STEPS):
            if position < oldest:
                break
            slot = position & mask
            if log[slot - MIN_MATCH : slot] == gram:
                found.append(slot)
                if len(found) == CANDIDATES:
                    break
            position = earlier[slot]
        matched, count = MIN_MATCH, len(past)
        for length in _SHORTEST_FIRST:
            if length > count or not found:
                break
            tail = past[-length:]
            matching = [slot for slot in found if log[slot - length : slot] == tail]
            if not matching:
                break
            found, matched = matching, length
        return _Votes(tuple(found), matched)


class _Votes(NamedTuple):
    positions: tuple[int, ...]
    matched: int


_NO_VOTES = _Votes((), 0)
_SHORTEST_FIRST = LENGTHS[::-1]


def _majorities(ahead: list[array[int]]) -> Iterator[tuple[int, int]]:
    """The leading token at each index of the runs, and its support; runs with another token no longer vote."""
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


class _VoteAccuracy:
    """How often votes were right, by the length of their match with the context and by the leader's support:
    a single position; several that all agree; a majority; fewer than half.

    Each cell starts with the estimate of PPM's method C (Moffat, 1990), weighted as two observations.
    """

    def __init__(self) -> None:
        self._right = [[2.0 * prior for prior in _PRIORS] for _ in range(len(LENGTHS) + 1)]
        self._seen = [[2.0] * len(_PRIORS) for _ in range(len(LENGTHS) + 1)]
        self.estimates = [list(_PRIORS) for _ in range(len(LENGTHS) + 1)]

    def learn(self, matched: int, support: int, right: bool) -> None:
        row = _ROWS[matched]
        self._right[row][support] += right
        self._seen[row][support] += 1
        self.estimates[row][support] = self._right[row][support] / self._seen[row][support]


_PRIORS = (1 / 2, 4 / 5, 1 / 2, 1 / 4)

_ROWS = tuple(sum(matched < length for length in LENGTHS) for matched in range(LENGTHS[0] + 1))
"""The row of each match length; a longer one counts as the longest."""
