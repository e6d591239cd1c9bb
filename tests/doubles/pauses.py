"""Pauses at random, as on a busy machine, of event loops and of the runners of tests.

A test that depends on which thread is first fails with them again and again, and without them once in a hundred runs.
"""

from __future__ import annotations

import asyncio.base_events
import random
import time
from collections.abc import Callable
from typing import Any

from headrace.testing.hashing_runner import HashingRunner
from tests.doubles.scripted_runner import ScriptedRunner

SHARE = 0.08
"""Share of the turns of a loop, and of the steps of a runner, that pause."""

SECONDS = 0.06
"""Length of the longest pause."""


def pause_at_random(seed: int) -> None:
    """From now on each turn of an event loop, and each step of a runner without a model, may pause before it."""
    drawn = random.Random(seed)

    def pausing(method: Callable[..., Any]) -> Callable[..., Any]:
        def paused(self: Any) -> Any:
            if drawn.random() < SHARE:
                time.sleep(drawn.random() * SECONDS)
            return method(self)

        return paused

    loops = asyncio.base_events.BaseEventLoop
    loops._run_once = pausing(loops._run_once)  # type: ignore[attr-defined]
    for runner in (HashingRunner, ScriptedRunner):
        runner.collect = pausing(runner.collect)  # type: ignore[method-assign]
