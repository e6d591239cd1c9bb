"""Overhead of ``--record-trace`` on the engine's thread, and size of the trace: decoding without a model.

Rounds with and without recording alternate. Times are CPU times of the engine's thread, separate from those of the
writer thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.stage import say
from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.engine import Engine
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.prediction.step_cost import StepCost
from headrace.core.request import Request, SamplingParams
from headrace.observe.recording.trace_file import TraceWriter
from headrace.wiring.engine import make_engine, make_knobs
from headrace.wiring.recording import make_recorded_engine

PROMPT_TOKENS = 200


class Echo:
    """A runner that always draws the same token."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        self._plans.append(plan)

    def collect(self) -> StepOutput:
        plan = self._plans.popleft()
        return StepOutput(plan.step, tuple((1,) if row.samples else () for row in plan.rows))


class Cost(NamedTuple):
    """One run: CPU microseconds per step of the engine's thread and of all others, bytes per generated token."""

    engine: float
    writer: float
    size: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    say("rows   engine µs/step: plain, recorded   writer µs/step   bytes/token: plain, gz")
    for rows in args.rows:
        plain, recorded, small = [], [], []
        for _ in range(args.rounds):
            plain.append(_measure(rows, args.steps, None))
            recorded.append(_measure(rows, args.steps, "trace.jsonl"))
            small.append(_measure(rows, args.steps, "trace.jsonl.gz"))
        say(
            f"{rows:4}   {_median(plain, 'engine'):22.1f}, {_median(recorded, 'engine'):8.1f}"
            f"   {_median(recorded, 'writer'):14.1f}   {_median(recorded, 'size'):17.1f}, {_median(small, 'size'):.1f}"
        )


def _median(costs: list[Cost], name: str) -> float:
    return median(getattr(cost, name) for cost in costs)


def _measure(rows: int, steps: int, name: str | None) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (name or "none")
        tape = TraceWriter(path, 1 << 32) if name else None
        engine = _engine(rows, steps, tape)
        for number in range(rows):
            prompt = tuple(number * PROMPT_TOKENS + i for i in range(PROMPT_TOKENS))
            engine.submit(Request(f"request-{number}", prompt, SamplingParams(max_tokens=steps)), 0.0)
        began, all_began = time.thread_time(), time.process_time()
        now = 0.0
        while engine.wake_at(now) is not None:
            engine.step(now := now + 0.001)
        spent = time.thread_time() - began
        if tape:
            tape.close()
        rest = time.process_time() - all_began - (time.thread_time() - began)
        size = path.stat().st_size if tape else 0
        return Cost(1e6 * spent / steps, 1e6 * rest / steps, size / (rows * steps))


def _engine(rows: int, steps: int, tape: TraceWriter | None) -> Engine:
    plans = SchedulerOptions(max_num_seqs=rows, max_num_batched_tokens=max(rows, 8192))
    compose = partial(make_recorded_engine, tape.tell) if tape else make_engine
    longest = PROMPT_TOKENS + steps + 1
    return compose(
        plans,
        CacheOptions(),
        Echo(),
        num_blocks=rows * (longest // 16 + 2),
        max_model_len=longest,
        knobs=make_knobs(plans, "cpu", longest),
        cost=StepCost(),
        overlap=0,
    )


if __name__ == "__main__":
    main()
