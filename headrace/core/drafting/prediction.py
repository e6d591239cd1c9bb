"""The client's prediction as a draft: the OpenAI field ``prediction``."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.drafting.known_text import LONGEST, Continuation, KnownText
from headrace.core.drafting.proposal import DraftAsk, Proposal
from headrace.core.request import Request


class PredictionProposer:
    """Proposes the text that the client predicts (`Request.prediction`), found again after each edit.

    ``most`` is the longest proposal in tokens.
    """

    name = "prediction"

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: dict[str, KnownText] = {}
        self._confidences = tuple((2 * agreed + 1) / (2 * agreed + 2) for agreed in range(LONGEST + most + 1))

    @property
    def nbytes(self) -> int:
        """Memory of the texts and their indexes."""
        return sum(text.nbytes for text in self._texts.values())

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        return [self._propose(ask) for ask in asks]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Drop the text of a request."""
        self._texts.pop(request.id, None)

    def _text(self, request: Request) -> tuple[int, ...]:
        return request.prediction

    def _propose(self, ask: DraftAsk) -> Proposal | None:
        text = self._text(ask.request)
        if not text:
            return None
        start = len(ask.request.tokens)
        known = self._texts.get(ask.request.id)
        if known is None or known.seen > len(ask.tokens) - start:
            known = self._texts[ask.request.id] = KnownText(text)
        found = known.follow(ask.tokens, start)
        return None if found is None else self._slice(text, found, min(self._most, ask.most))

    def _slice(self, text: tuple[int, ...], found: Continuation, most: int) -> Proposal | None:
        tokens = text[found.place : found.place + most]
        if not tokens:
            return None
        return Proposal(tokens, self._confidences[found.agreed : found.agreed + len(tokens)], self.name)
