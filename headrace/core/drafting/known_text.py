"""Follows a known text that the output probably repeats: a pointer into it, which finds its place again after an edit.

```
 known text   def area ( self , width , height ) :          the pointer: the token expected next
 output       def area ( self , w ,                         w differs, so the place is searched again:
                                    ^ height ) :            after "," it is the nearest one ahead
```
After a mismatch the place is where the longest end of the output occurs in the text; of equal places, the nearest to
the old pointer, preferably ahead of it. Until there is one, the differing tokens are taken for a replacement of as
many tokens. A proposal is always a slice of the text.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 16
"""The length from which a longer agreement counts no more."""

AHEAD, BEHIND = 6, 2
"""Places of the last two tokens that are compared: the nearest ones in each direction."""

NEAR = 48
"""How far ahead of the pointer a single agreeing token counts as the place."""

GUESSES = 4
"""Differing tokens up to which they are taken for a replacement of as many tokens."""

AT_START = 8
"""The agreement that a text counts as having before its first token has been compared."""


class Continuation(NamedTuple):
    """Where the output goes on in the text, and how many tokens before that place agree (0: a guess)."""

    place: int
    agreed: int


class KnownText:
    """A pointer into ``text``, moved by the tokens of an output."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = tuple(text)
        self._pairs: dict[tuple[int, int], list[int]] = {}
        self._place = 0
        self._agreed = AT_START
        self._strayed = 0  # tokens since the output left the text
        self.seen = 0  # tokens of the output so far

    @property
    def nbytes(self) -> int:
        """Memory, estimated by its tokens: the text, and a pair with its list of places."""
        return len(self.text) * (8 + (200 if self._pairs else 0))

    def follow(self, tokens: list[int], start: int) -> Continuation | None:
        """Move over the tokens of the output that are new; the output begins at ``start`` of ``tokens``."""
        text, new = self.text, tokens[start + self.seen :]
        if new:
            self.seen += len(new)
            place = self._place
            if not self._strayed and text[place : place + len(new)] == tuple(new):
                self._place = place + len(new)
                self._agreed = min(LONGEST, self._agreed + len(new))
            else:
                self._move(tokens, start, len(new))
        if self._strayed > GUESSES or self._place >= len(text):
            return None
        return Continuation(self._place, self._agreed)

    def _move(self, tokens: list[int], start: int, count: int) -> None:
        """Move over ``count`` tokens, of which not all are as expected."""
        for end in range(len(tokens) - count + 1, len(tokens) + 1):
            token = tokens[end - 1]
            if not self._strayed and self._place < len(self.text) and self.text[self._place] == token:
                self._place += 1
                self._agreed = min(LONGEST, self._agreed + 1)
            else:
                self._search(tokens, start, end)

    def _search(self, tokens: list[int], start: int, end: int) -> None:
        """Find the place after ``tokens[:end]``, or take the last token for a replacement."""
        found = self._by_pair(tokens, start, end) if end - start > 1 else None
        if found is None:
            token = tokens[end - 1]
            limit = min(len(self.text), self._place + NEAR)
            ahead = self._place
            while ahead < limit and self.text[ahead] != token:
                ahead += 1
            found = Continuation(ahead + 1, 1) if ahead < limit else None
        if found is not None:
            self._place, self._agreed = found
            self._strayed = 0
            return
        self._strayed += 1
        self._agreed = 0
        self._place = min(len(self.text), self._place + 1)

    def _by_pair(self, tokens: list[int], start: int, end: int) -> Continuation | None:
        """The place where the longest end of the output occurs, of at least two tokens."""
        text = self.text
        if not self._pairs:
            for place, pair in enumerate(itertools.pairwise(text), 2):
                self._pairs.setdefault(pair, []).append(place)
        places = self._pairs.get((tokens[end - 2], tokens[end - 1]))
        if places is None:
            return None
        middle = bisect_left(places, self._place)
        best = Continuation(0, 0)
        for place in (*places[middle : middle + AHEAD], *places[max(0, middle - BEHIND) : middle][::-1]):
            most = min(LONGEST, place, end - start)
            agreed = 2
            while agreed < most and text[place - agreed - 1] == tokens[end - agreed - 1]:
                agreed += 1
            if agreed > best.agreed:
                best = Continuation(place, agreed)
        return best
