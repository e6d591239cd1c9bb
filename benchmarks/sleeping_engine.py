"""Headrace with a runner that sleeps in place of a model, to measure what a server does beside computing.

``python -m benchmarks.sleeping_engine serve MODEL ...`` is ``headrace serve`` with this runner. Each step takes the
time of ``SLEEPING_STEP_MS``, on a device that computes one step after the other, as a GPU does. The default is the
measured time of Qwen3-0.6B on an H200 with 256 rows. With ``--engine-process`` the same file is the program of the
engine's process. ``offline STREAMS TOKENS MODEL`` runs the engine alone and prints its rate as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from typing import Any
from unittest import mock

from headrace.core.events import Emitted, Finished
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.request import Request, SamplingParams
from headrace.wiring import engine_process, model
from headrace.wiring.loading import memory

STEP_MS = "SLEEPING_STEP_MS"
H200_MS = 8.65

FIRST_TOKEN, TOKENS = 300, 500
"""Sampled tokens are of this range: ordinary pieces of text in the vocabulary of the built-in model."""


class SleepingRunner:
    """A `core.ports.Runner` whose steps take ``seconds`` each; ``inner`` does all else, and computes nothing."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self._free_at = 0.0
        self._launched: deque[tuple[float, StepOutput]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: StepPlan, now: float) -> None:
        tokens = tuple(
            (FIRST_TOKEN + (31 * (row.start + row.length) + 7 * row.slot) % TOKENS,) if row.samples else ()
            for row in plan.rows
        )
        self._free_at = max(self._free_at, time.monotonic()) + self._seconds
        self._launched.append((self._free_at, StepOutput(plan.step, tokens)))

    def collect(self) -> StepOutput:
        ends, output = self._launched.popleft()
        while (left := ends - time.monotonic()) > 0:
            time.sleep(left)
        return output


def install() -> None:
    """Replace the runner of every model that is loaded from now on in this process and in its engine process."""
    opened = memory.open_memory

    def open_memory(*arguments: Any) -> Any:
        made = opened(*arguments)
        runner: Any = SleepingRunner(made.runner, float(os.environ.get(STEP_MS, H200_MS)) / 1000)
        return made._replace(runner=runner)

    mock.patch.object(model, "open_memory", open_memory).start()
    engine_process.PROGRAM = __spec__.name


def offline(streams: int, tokens: int, name: str) -> dict[str, float]:
    """Output tokens per second and CPU time per token, in microseconds, of the engine alone."""
    from headrace.config import options

    loaded = model.load(options({"model": name, "max_num_seqs": streams, "overlap": 1, "device": "cpu"}))
    loaded.warm_up()
    engine, params = loaded.engine, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number in range(streams):
        prompt = tuple(FIRST_TOKEN + (number + each) % TOKENS for each in range(16))
        engine.submit(
            Request(f"offline-{number}", prompt, params, arrived=time.monotonic()), time.monotonic()
        )
    began, spent, running, made = time.perf_counter(), time.process_time(), streams, 0
    while running:
        for event in engine.step(time.monotonic()):
            running -= type(event) is Finished
            made += len(event.tokens) if type(event) is Emitted else 0
    seconds, spent = time.perf_counter() - began, time.process_time() - spent
    loaded.close(True)
    return {"tokens_per_second": made / seconds, "microseconds": spent / made * 1e6}


def main() -> None:
    """Run what the arguments ask for."""
    install()
    if sys.argv[1] == "offline":
        print(json.dumps(offline(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
    elif sys.argv[1].isdigit():
        engine_process.main()
    else:
        from headrace.cli import main as headrace

        headrace()


if __name__ == "__main__":
    main()
