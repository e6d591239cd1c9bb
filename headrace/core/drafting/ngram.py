"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens in the same request.

```
 tokens    the cat sat on the mat . then the cat | ?        the longest suffix with an earlier occurrence
           ^^^^^^^                       ^^^^^^^
                   sat on the mat                           what followed it there is proposed
```
The text of each request is kept as a string with one character per token, and searched from its end. A search costs
about a nanosecond per token, far less than attention to it. An index of all n-grams would cost more to build than most
requests ever need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request

# Tokens as a string, because a string is searched faster than a list.


def characters(tokens: Sequence[int]) -> str:
    """One character per token. Ids beyond Unicode may share a character: a wrong proposal is only rejected."""
    try:
        return "".join(map(chr, tokens))
    except (ValueError, OverflowError):
        return "".join(chr(token % (sys.maxunicode + 1)) for token in tokens)


class NgramProposer:
    """Proposes from the request's own prompt and output.

    Args:
        max_tokens: the maximum length of a proposal.
        min_n: the shortest suffix that is looked up, in tokens.
        max_n: longer matches than this are not looked for, in tokens.
    """

    name = "ngram"

    def __init__(self, max_tokens: int, min_n: int = 2, max_n: int = 16) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n ({min_n}) must be at least 1 and at most max_n ({max_n})")
        self._max_tokens = max_tokens
        self._min_n = min_n
        self._max_n = max_n
        self._confidences = tuple(matched / (matched + 1) for matched in range(max_n + max_tokens + 1))
        self._texts: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the texts of all requests."""
        return sum(map(sys.getsizeof, self._texts.values()))

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        return [self._propose(draft_row) for draft_row in draft_rows]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Drop the text of a request."""
        self._texts.pop(request.id, None)

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        tokens, name = draft_row.tokens, draft_row.request.id
        text = self._texts.pop(name, "")  # the only reference: the string grows in place
        if len(text) > len(tokens):
            text = ""  # it belongs to another request with the same id
        text += characters(tokens[len(text) :])
        self._texts[name] = text
        max_tokens = min(self._max_tokens, draft_row.max_tokens)
        position, matched = self._longest_match(text)
        if not matched or max_tokens < 1:
            return None
        run = tokens[position : position + max_tokens]
        if len(run) < max_tokens:  # the text repeats with a short period, and so does the proposal
            run = (run * (max_tokens // len(run) + 1))[:max_tokens]
        return Proposal(tuple(run), self._confidences[matched : matched + max_tokens], self.name)

    def _longest_match(self, text: str) -> tuple[int, int]:
        """The position after the newest of the longest earlier occurrences of a suffix, and its length (0: none)."""
        position, matched, longest = len(text), 0, self._max_n
        size = self._min_n
        while matched < longest and size < len(text):
            # No later occurrence is as long, so the search continues before the last one.
            found = text.rfind(text[-size:], 0, position - 1)
            if found < 0:
                break
            position, matched = found + size, size
            while matched < longest and matched < position and text[position - matched - 1] == text[~matched]:
                matched += 1
            size = matched + 1
        return position, matched
