"""Builds cache warming from its options: the request history, and the warmer that computes responses ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from headrace.api.cache.question_recorder import QuestionRecorder
from headrace.api.cache.warm import Computing, Warm
from headrace.api.model import ServedModel
from headrace.config import ConfigError, ResponseCacheOptions, ServerOptions, WarmOptions
from headrace.response_cache.history import History
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.rules.verdicts import Verdicts
from headrace.response_cache.rules.warming import IdleDetector
from headrace.response_cache.warmer import BackgroundRequests, Warmer

SETTLE_SECONDS = 2.0
"""Time of low traffic before warming starts."""


def open_history(options: WarmOptions) -> History | None:
    """The request history, if one is configured.

    Raises:
        ConfigError: its file cannot be used, or requests are to be recorded without one.
    """
    if options.history_file is None:
        if options.record_history:
            raise ConfigError("--record-history needs --history-file")
        return None
    try:
        return History(Path(options.history_file))
    except OSError as error:
        raise ConfigError(f"--history-file: {error}") from error


def make_recorder(options: WarmOptions, history: History | None) -> QuestionRecorder | None:
    """The recorder that writes requests to the history."""
    return None if history is None else QuestionRecorder(history, options.record_history)


class Warming:
    """The parts of warming: `warmer`, `endpoint`, and the condition for readiness."""

    def __init__(
        self,
        options: WarmOptions,
        caching: ResponseCacheOptions,
        server: ServerOptions,
        recall: CacheLookup,
        model: ServedModel,
        history: History | None,
        verdicts: Verdicts | None = None,
    ) -> None:
        computing = Computing(
            BackgroundRequests(recall), recall.service, model, server.request_timeout, verdicts
        )
        clock: Callable[[], float] = time.monotonic
        settle = 0.0 if options.warm_before_ready else SETTLE_SECONDS
        self.warmer = Warmer(
            computing.compute,
            lambda: recall.service.awaited,
            IdleDetector(options.warm_below_rate, settle, clock()),
            clock,
            time.time,
            batch=options.warm_batch,
            seconds_per_hour=options.warm_seconds_per_hour,
            horizon_seconds=caching.response_cache_ttl,
            history=history,
            pairs=(lambda: None) if verdicts is None else verdicts.next,
        )
        self.endpoint = Warm(self.warmer, computing, model, max_body_bytes=server.max_body_bytes)
        self._ready_by = clock() + options.warm_before_ready
        self._clock = clock

    def not_yet(self) -> str:
        """The work that must end before the server is ready; empty if there is none."""
        return "warming" if not self.warmer.settled and self._clock() < self._ready_by else ""
