"""Builds the request settings that experiments may compare on a server with given options, without torch."""

from __future__ import annotations

from headrace.config import SchedulerOptions
from headrace.core.request import ALL_METHODS
from headrace.tuning.steering.engine import Requests
from headrace.tuning.steering.settings import AnyValue, request_settings
from headrace.wiring.drafting import speculation


def make_requests(
    plans: SchedulerOptions, *, request_timeout: float | None = None, semantic: bool = False
) -> Requests:
    """The settings and their current values.

    ``request_timeout`` is the configured one (None: there is none); ``semantic``: the semantic cache serves responses.

    Raises:
        ConfigError: the configuration of speculative decoding is invalid.
    """
    drafts = speculation(plans)
    methods = () if drafts is None else drafts.methods
    most = 0 if drafts is None else drafts.num_speculative_tokens
    start: dict[str, AnyValue] = {
        "draft_method": ALL_METHODS,
        "draft_tokens": most,
        "semantic_min_similarity": 0.0,
    }
    if request_timeout is not None:
        start["request_timeout"] = request_timeout
    settings = {
        name: each for name, each in request_settings(methods, most, semantic).items() if name in start
    }
    return Requests(settings, {name: start[name] for name in settings})
