"""Builds the experiments and the tuner of one engine, live or in virtual time, without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.config import SchedulerOptions
from headrace.core.knobs import Knobs
from headrace.core.request import ALL_METHODS
from headrace.tuning.engine_tuning import EngineTuning, Requests
from headrace.tuning.evaluator import Evaluate, ReadCurve, not_evaluated, nothing_measured
from headrace.tuning.settings import AnyValue, live_settings, request_settings
from headrace.tuning.tuner import Mode
from headrace.wiring.drafting import speculation
from headrace.wiring.engine import has_patience, is_static


class Tuned(Protocol):
    """An engine with its settings."""

    @property
    def knobs(self) -> Knobs: ...


def make_engine_tuning(
    plans: SchedulerOptions,
    engine: Tuned,
    make_id: Callable[[], str],
    *,
    request_timeout: float | None = None,
    semantic: bool = False,
    mode: Mode = Mode.OFF,
    window_seconds: float = 20.0,
    read_curve: ReadCurve = nothing_measured,
    evaluate: Evaluate = not_evaluated,
) -> EngineTuning:
    """Experiments and tuner of an engine with these options.

    ``request_timeout`` is the configured one (None: there is none); ``semantic``: the semantic cache serves responses.

    Raises:
        ConfigError: the configuration of speculative decoding is invalid.
    """
    return EngineTuning(
        live_settings(plans.max_num_seqs, static=is_static(plans), patience=has_patience(plans)),
        lambda: engine.knobs,
        make_id,
        mode,
        window_seconds,
        make_requests(plans, request_timeout=request_timeout, semantic=semantic),
        read_curve,
        evaluate,
    )


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
