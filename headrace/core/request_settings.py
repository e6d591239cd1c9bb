"""Settings that each request carries, so that requests served side by side may have different ones.

They are settings whose effect stays with the request: how it is drafted for, which cached responses may serve it, how
long it may take. What all requests of a step share (its size, the order of the queue) is in `core.knobs`. Experiments
compare values of these settings on a part of the requests.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL_METHODS = "all"
"""The ``draft_method`` that leaves the choice to the drafter."""

NO_METHOD = "none"
"""The ``draft_method`` of a request that is not drafted for."""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """The settings of one request; None leaves a setting to the server.

    ``draft_method`` names the only method of speculative decoding that may propose tokens (or `ALL_METHODS`, or
    `NO_METHOD`); ``draft_tokens`` bounds the tokens drafted in a step. ``semantic_min_similarity`` is the smallest
    cosine at which the response of a similar request is served, beside the calibrated threshold, which always holds.
    ``request_timeout`` (seconds) ends the request.
    """

    draft_method: str = ALL_METHODS
    draft_tokens: int | None = None
    semantic_min_similarity: float = 0.0
    request_timeout: float | None = None

    def may_draft(self, method: str) -> bool:
        """Whether this method of drafting may propose tokens."""
        return self.draft_method in (ALL_METHODS, method)

    def limit_drafted(self, count: int) -> int:
        """``count``, limited to the tokens that may be drafted in a step."""
        if self.draft_method == NO_METHOD:
            return 0
        return count if self.draft_tokens is None else min(count, self.draft_tokens)


NO_SETTINGS = RequestSettings()
"""No setting of its own: the server's configuration applies."""
