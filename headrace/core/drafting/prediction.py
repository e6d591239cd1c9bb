"""Predicted outputs: the text of the OpenAI field ``prediction`` as a draft."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.drafting.known_text import MAX_MATCH, Continuation, KnownText
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request


class PredictionProposer:
    """Proposes the text that the client predicts (`Request.prediction`), and finds its position again after each edit.

    ``max_tokens`` is the maximum length of a proposal.
    """

    name = "prediction"

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._texts: dict[str, KnownText] = {}
        self._confidences = tuple(
            (2 * matched + 1) / (2 * matched + 2) for matched in range(MAX_MATCH + max_tokens + 1)
        )

    @property
    def nbytes(self) -> int:
        """Memory of the texts of all requests."""
        return sum(text.nbytes for text in self._texts.values())

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        return [self._propose(draft_row) for draft_row in draft_rows]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Drop the text of a request."""
        self._texts.pop(request.id, None)

    def _text(self, request: Request) -> tuple[int, ...]:
        return request.prediction

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        text = self._text(draft_row.request)
        if not text:
            return None
        start = len(draft_row.request.tokens)
        known = self._texts.get(draft_row.request.id)
        if known is None or known.seen > len(draft_row.tokens) - start:
            known = self._texts[draft_row.request.id] = KnownText(text)
        found = known.advance(draft_row.tokens, start)
        return (
            None if found is None else self._slice(text, found, min(self._max_tokens, draft_row.max_tokens))
        )

    def _slice(self, text: tuple[int, ...], found: Continuation, max_tokens: int) -> Proposal | None:
        tokens = text[found.position : found.position + max_tokens]
        if not tokens:
            return None
        return Proposal(tokens, self._confidences[found.matched : found.matched + len(tokens)], self.name)
