"""Follows a known text that the output probably repeats: a pointer into it, which finds its place again after an edit.

```
 known text   def area ( self , width , height ) :          the pointer: the token expected next
 output       def area ( self , w ,                         w differs: it may stand for width, or come before it, or
                                    ^ height ) :            the text may go on elsewhere. The "," decides
```
After a mismatch there are several places where the text may go on. The first one is proposed, and the tokens that come
decide between them. Where none is right, the place is where the longest end of the output occurs in the text; of equal
places, the nearest to the old pointer, preferably ahead of it. A proposal is always a slice of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.drafting.characters import characters

LONGEST = 16
"""The length from which a longer agreement counts no more."""

AHEAD, BEHIND = 6, 2
"""Places of the last two tokens that are compared: the nearest ones in each direction."""

NEAR, CLOSE = 48, 2
"""How far ahead of the pointer a single agreeing token may be the place, and how far it is a likely one."""

SURE = 3
"""The agreement from which the place is likelier than one near the old pointer."""

GUESSES = 4
"""Differing tokens up to which guesses are proposed."""

MANY = 8
"""Tokens from one that differs on, up to which each one is compared; of more, only the end is searched for."""

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
        self._searched = ""  # the text with a character for each token, made when it is first searched
        self._place = 0
        self._agreed = AT_START
        self._others: list[int] = []  # other places that the tokens since the last mismatch agree with
        self._strayed = 0  # tokens since the output left the text
        self.seen = 0  # tokens of the output so far

    @property
    def nbytes(self) -> int:
        """Memory, estimated by its tokens: the text, and its characters."""
        return len(self.text) * (8 + (4 if self._searched else 0))

    def follow(self, tokens: list[int], start: int) -> Continuation | None:
        """Move over the tokens of the output that are new; the output begins at ``start`` of ``tokens``."""
        end, self.seen = start + self.seen, len(tokens) - start
        while end < len(tokens):
            if not self._others and (right := self._right(tokens, end)):
                self._place += right
                self._agreed = min(LONGEST, self._agreed + right)
                self._strayed = 0
                end += right
            elif self._decide(tokens, start, end + 1):
                end += 1
            elif len(tokens) - end > MANY:
                self._jump(tokens, start, len(tokens) - end)
                break
            else:
                end += 1
                self._search(tokens, start, end)
        if self._strayed > GUESSES or self._place >= len(self.text):
            return None
        return Continuation(self._place, self._agreed)

    def _right(self, tokens: list[int], end: int) -> int:
        """How many tokens from ``end`` on are as expected."""
        new = tokens[end:]
        expected = self.text[self._place : self._place + len(new)]
        if expected == tuple(new):
            return len(new)
        pairs = enumerate(zip(new, expected, strict=False))
        return next((at for at, (token, right) in pairs if token != right), len(expected))

    def _decide(self, tokens: list[int], start: int, end: int) -> bool:
        """Keep the places that agree with the last of ``tokens[:end]``; False if none does."""
        token, text = tokens[end - 1], self.text
        agreeing = [
            place + 1 for place in (self._place, *self._others) if text[place : place + 1] == (token,)
        ]
        if not agreeing:
            return False
        if len(agreeing) > 1:
            lengths = [self._agreement(tokens, start, end, place) for place in agreeing]
            if max(lengths) >= SURE:
                agreeing.insert(0, agreeing.pop(lengths.index(max(lengths))))
        self._place, *self._others = agreeing
        self._agreed = min(LONGEST, self._agreed + 1)
        self._strayed = 0
        return True

    def _jump(self, tokens: list[int], start: int, count: int) -> None:
        """Move over the last ``count`` tokens by their end: nothing is proposed unless it occurs in the text."""
        self._place = min(len(self.text), self._place + count - 1)
        found = self._by_pair(tokens, start, len(tokens))
        if found is None:
            self._strayed, self._others = GUESSES + 1, []
        else:
            self._go_on_from(found, tokens[-1])

    def _search(self, tokens: list[int], start: int, end: int) -> None:
        """Find the places where the text may go on after ``tokens[:end]``, the likeliest first."""
        self._go_on_from(self._by_pair(tokens, start, end) if end - start > 1 else None, tokens[end - 1])

    def _go_on_from(self, found: Continuation | None, token: int) -> None:
        """The output left the text with ``token``, and its end was ``found`` in the text."""
        long = found is not None and found.agreed >= SURE
        self._agreed = found.agreed if long and found is not None else 0
        self._strayed = 0 if found is not None else self._strayed + 1
        places = [found.place] if long and found is not None else []
        place = self._place
        near = self.text[place : place + NEAR]
        skipped = near.index(token) if token in near else NEAR
        if skipped < CLOSE:  # a few tokens of the text were left out
            places.append(place + skipped + 1)
        places += (place + 1, place)  # the token replaces one, or was put in
        if found is not None:
            places.append(found.place)
        if CLOSE <= skipped < NEAR:
            places.append(place + skipped + 1)
        self._place, *self._others = dict.fromkeys(each for each in places if each <= len(self.text))

    def _by_pair(self, tokens: list[int], start: int, end: int) -> Continuation | None:
        """The place where the longest end of the output occurs, of at least two tokens."""
        best = Continuation(0, 0)
        for place in self._occurrences(characters(tokens[end - 2 : end])):
            agreed = self._agreement(tokens, start, end, place)
            if agreed > best.agreed:
                best = Continuation(place, agreed)
        return best if best.agreed else None

    def _occurrences(self, pair: str) -> list[int]:
        """The places after the nearest occurrences of two tokens, those from the pointer on first.

        A search in a string takes less time than an index of all pairs, which most texts need once or never.
        """
        if not self._searched:
            self._searched = characters(self.text)
        text, found = self._searched, list[int]()
        at = max(0, self._place - 2)
        while len(found) < AHEAD and (at := text.find(pair, at)) >= 0:
            found.append(at + 2)
            at += 1
        end = max(0, self._place - 1)
        for _ in range(BEHIND):
            at = text.rfind(pair, 0, end)
            if at < 0:
                break
            found.append(at + 2)
            end = at + 1
        return found

    def _agreement(self, tokens: list[int], start: int, end: int, place: int) -> int:
        """How many tokens before ``place`` agree with the end of ``tokens[:end]``."""
        text, agreed, most = self.text, 0, min(LONGEST, place, end - start)
        while agreed < most and text[place - agreed - 1] == tokens[end - agreed - 1]:
            agreed += 1
        return agreed
