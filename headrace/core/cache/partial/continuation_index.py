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
from collections.abc import Sequence
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

    def add(self, output: Sequence[int], lead: Sequence[int] = (), *, max_bytes: int) -> None:
        """Add one output; ``lead`` are the last tokens of the prompt before it.

        The index may use up to ``max_bytes`` for it, and never less than its initial size.
        """
        tokens = (*lead[-GRAM:], *output)
        # After places have been reused, doubling would change their slots.
        while self._end <= self._size < self._end + len(tokens) + 1 and 2 * self.nbytes <= max_bytes:
            self._double()
        most = self._size // 2
        for start in range(0, len(tokens), most):
            self._write(tokens[max(0, start - GRAM) : start + most])
        self.outputs += 1

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
                leader = _leader([self._log[place] for place in votes.places])
                if leader.token != END:
                    self._trust.learn(votes.agreed, leader, leader.token == tokens[at])

    def propose(self, context: Sequence[int], max_tokens: int) -> Proposal:
        """Up to ``max_tokens`` tokens that may follow ``context``, of which the last `LENGTHS`[0] tokens count."""
        past = array("I", context[-LENGTHS[0] :])
        votes = self._votes(past)
        if not votes.places or max_tokens < 1:
            return NOTHING
        ahead = [self._log[place : place + max_tokens] for place in votes.places]
        tokens: list[int] = []
        probabilities: list[float] = []
        chance = 1.0
        for at in range(max_tokens):
            leader = _leader([run[at] for run in ahead if at < len(run)])
            probability = self._trust.estimate(votes.agreed + at, leader)
            chance *= probability
            if leader.token == END or chance < FLOOR:
                break
            tokens.append(leader.token)
            probabilities.append(probability)
            if leader.votes < leader.voters:
                ahead = [run for run in ahead if at < len(run) and run[at] == leader.token]
        return Proposal(tuple(tokens), tuple(probabilities), votes.agreed)

    def _votes(self, past: array[int]) -> _Votes:
        """The slots after the places that agree longest with ``past``, newest first."""
        if len(past) < GRAM:
            return _Votes((), 0)
        log, earlier, mask = self._log, self._earlier, self._size - 1
        oldest = self._end - self._size
        gram = past[-GRAM:]
        place = self._heads[hash(tuple(gram)) & mask]
        found: list[int] = []
        for _ in range(STEPS):
            if place < GRAM or place < oldest:
                break
            slot = place & mask
            if log[slot - GRAM : slot] == gram:
                found.append(slot)
                if len(found) == CANDIDATES:
                    break
            place = earlier[slot]
        for length in LENGTHS:
            if length <= len(past):
                tail = past[-length:]
                agreeing = [slot for slot in found if log[slot - length : slot] == tail]
                if agreeing:
                    return _Votes(tuple(agreeing), length)
        return _Votes(tuple(found), GRAM)


class _Votes(NamedTuple):
    places: tuple[int, ...]
    agreed: int


class _Leader(NamedTuple):
    token: int
    votes: int
    voters: int


def _leader(ballots: Sequence[int]) -> _Leader:
    """The token with most votes; of equals the first one, which is the newest."""
    if not ballots:
        return _Leader(END, 0, 0)
    first = ballots[0]
    votes = ballots.count(first)
    if 2 * votes >= len(ballots):
        return _Leader(first, votes, len(ballots))
    leader = max(dict.fromkeys(ballots), key=ballots.count)
    return _Leader(leader, ballots.count(leader), len(ballots))


class _Trust:
    """How often votes were right, by the length of their agreement with the context and by their agreement with each
    other.

    Each cell starts with the estimate of PPM's method C (Moffat, 1990), weighted as two observations.
    """

    def __init__(self) -> None:
        self._right = [[2.0 * prior for prior in _PRIORS] for _ in range(len(LENGTHS) + 1)]
        self._seen = [[2.0] * len(_PRIORS) for _ in range(len(LENGTHS) + 1)]

    def learn(self, agreed: int, leader: _Leader, right: bool) -> None:
        row, column = _row(agreed), _column(leader)
        self._right[row][column] += right
        self._seen[row][column] += 1

    def estimate(self, agreed: int, leader: _Leader) -> float:
        row, column = _row(agreed), _column(leader)
        return self._right[row][column] / self._seen[row][column]


_PRIORS = (1 / 2, 4 / 5, 1 / 2, 1 / 4)
"""One place alone; several that all agree; a majority; fewer than half."""


def _row(agreed: int) -> int:
    for row, length in enumerate(LENGTHS):
        if agreed >= length:
            return row
    return len(LENGTHS)


def _column(leader: _Leader) -> int:
    if leader.votes == leader.voters:
        return 0 if leader.voters == 1 else 1
    return 2 if 2 * leader.votes >= leader.voters else 3
