"""A cached answer as a draft. It may not be served, because its request was only similar, but it is often accepted."""

from __future__ import annotations

from headrace.core.drafting.prediction import PredictionProposer
from headrace.core.request import Request


class CachedAnswerProposer(PredictionProposer):
    """Proposes the cached answer that the lookup found (`Request.cached_answer`)."""

    name = "cached"

    def _text(self, request: Request) -> tuple[int, ...]:
        return request.cached_answer
