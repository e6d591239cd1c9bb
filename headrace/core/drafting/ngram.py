"""Prompt lookup: proposes what followed the last tokens when they occurred earlier in the same request.

```
 tokens    the cat sat on the mat . then the cat | ?        the longest suffix with an earlier occurrence
           ^^^^^^^                       ^^^^^^^
                   sat on the mat                           what followed it there is proposed
```
The text of each request is kept as a string with a character for each token, and searched from its end. A search costs
about a nanosecond a token, far less than the attention to it; an index of all n-grams would cost more to build than
most requests ever need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.core.drafting.characters import characters
from headrace.core.drafting.proposal import DraftAsk, Proposal
from headrace.core.request import Request


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
        self._texts: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the texts of all requests."""
        return sum(map(sys.getsizeof, self._texts.values()))

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        return [self._propose(ask) for ask in asks]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Drop the text of a request."""
        self._texts.pop(request.id, None)

    def _propose(self, ask: DraftAsk) -> Proposal | None:
        tokens, name = ask.tokens, ask.request.id
        text = self._texts.pop(name, "")  # the only reference: the string grows in place
        if len(text) > len(tokens):
            text = ""  # of another request with the same id
        text += characters(tokens[len(text) :])
        self._texts[name] = text
        most = min(self._most, ask.most)
        place, agreed = self._longest(text)
        if not agreed or most < 1:
            return None
        run = tokens[place : place + most]
        if len(run) < most:  # the text repeats itself with a short period: so does the proposal
            run = (run * (most // len(run) + 1))[:most]
        return Proposal(tuple(run), self._confidences[agreed : agreed + most], self.name)

    def _longest(self, text: str) -> tuple[int, int]:
        """The newest of the places whose preceding tokens agree longest with the end, and that length (0: none).

        A place is the position of the token after an earlier occurrence.
        """
        place, agreed, longest = len(text), 0, self._max_n
        size = self._min_n
        while agreed < longest and size < len(text):
            # No later place agrees with so many tokens, so the search goes on before the last one.
            found = text.rfind(text[-size:], 0, place - 1)
            if found < 0:
                break
            place, agreed = found + size, size
            while agreed < longest and agreed < place and text[place - agreed - 1] == text[~agreed]:
                agreed += 1
            size = agreed + 1
        return place, agreed
