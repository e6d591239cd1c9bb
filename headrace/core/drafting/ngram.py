"""Prompt lookup: proposes what followed the last tokens when they occurred earlier in the same request.

```
 tokens    the cat sat on the mat . then the cat | ?        the longest suffix with an earlier occurrence
           ^^^^^^^                       ^^^^^^^
                   sat on the mat                           what followed it there is proposed
```
Each request has a small index: buckets of its n-grams of ``min_n`` tokens, and for each place the one before it in
the same bucket (12 bytes a token). Every `propose` adds the tokens that are new since the last one. The newest
`CANDIDATES` places compete by how many tokens before them agree with the end of the text, up to ``max_n``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headrace.core.drafting.proposal import DraftAsk, Proposal
from headrace.core.request import Request

CANDIDATES = 8
"""Places compared for a proposal, newest first: bounds its cost in repetitive text."""

STEPS = 32
"""Places of a bucket examined, including those of other n-grams in the same bucket."""

CHUNK = 4096
"""Tokens added to an index at once: bounds the time that a long prompt adds to its first step."""

SMALLEST = 256
"""Buckets of a new index; they double with the text."""

BYTES_PER_PLACE = 8 + 4
"""A bucket's head and a place's predecessor."""


class NgramProposer:
    """Proposes from the request's own prompt and output.

    Args:
        most: the longest proposal in tokens.
        min_n: the shortest suffix that is looked up, in tokens.
        max_n: the length from which a longer agreement counts no more.
    """

    name = "ngram"

    def __init__(self, most: int, min_n: int = 2, max_n: int = 16) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n ({min_n}) must be at least 1 and at most max_n ({max_n})")
        self._most = most
        self._min_n = min_n
        self._max_n = max_n
        self._confidences = tuple(agreed / (agreed + 1) for agreed in range(max_n + most + 1))
        self._indexes: dict[str, _Index] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the indexes of all requests."""
        return sum(index.nbytes for index in self._indexes.values())

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        return [self._propose(ask) for ask in asks]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Drop the index of a request."""
        self._indexes.pop(request.id, None)

    def _propose(self, ask: DraftAsk) -> Proposal | None:
        tokens = ask.tokens
        index = self._indexes.get(ask.request.id)
        if index is None or index.end > len(tokens):
            index = self._indexes[ask.request.id] = _Index(self._min_n)
        index.extend(tokens)
        most = min(self._most, ask.most)
        place, agreed = index.longest(tokens, self._max_n)
        if not agreed or most < 1:
            return None
        run = tokens[place : place + most]
        if len(run) < most:  # the text repeats itself with a short period: so does the proposal
            run = (run * (most // len(run) + 1))[:most]
        return Proposal(tuple(run), self._confidences[agreed : agreed + most], self.name)


class _Index:
    """Places of the n-grams of one text; a place is the position of the token after the n-gram."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heads = array("q", [-1]) * SMALLEST
        self._earlier = array("i", [-1]) * size  # by place, from 0
        self.end = size  # the next place to add

    @property
    def nbytes(self) -> int:
        return 8 * len(self._heads) + 4 * len(self._earlier)

    def extend(self, tokens: list[int]) -> None:
        """Add the places before the end of ``tokens``, at most `CHUNK` of them."""
        last = min(len(tokens), self.end + CHUNK)
        if last <= self.end:
            return
        while len(self._heads) < last:
            self._heads.extend(
                self._heads
            )  # a bucket becomes two with the same places, which are compared anyway
        heads, earlier, mask = self._heads, self._earlier, len(self._heads) - 1
        first = self.end - self._size
        grams = zip(*(tokens[first + at : last - self._size + at] for at in range(self._size)), strict=True)
        for place, gram in enumerate(grams, self.end):
            bucket = hash(gram) & mask
            earlier.append(heads[bucket])
            heads[bucket] = place
        self.end = last

    def longest(self, tokens: list[int], most: int) -> tuple[int, int]:
        """The place whose preceding tokens agree longest with the end of ``tokens``, and that length (0: none)."""
        size, count = self._size, len(tokens)
        if count <= size:
            return 0, 0
        gram = tokens[-size:]
        place = self._heads[hash(tuple(gram)) & (len(self._heads) - 1)]
        best, longest, compared = 0, 0, 0
        for _ in range(STEPS):
            if place < 0:
                break
            if tokens[place - size : place] == gram:
                agreed = size
                while agreed < most and agreed < place and tokens[place - agreed - 1] == tokens[~agreed]:
                    agreed += 1
                if agreed > longest:
                    best, longest = place, agreed
                compared += 1
                if agreed == most or compared == CANDIDATES:
                    break
            place = self._earlier[place]
        return best, longest
