"""Breakdown of a step's time: planning, preparation, the model's forward pass, sampling, commit.

A stopwatch between engine and runner times every call, and the runner reports the phases inside a call. It works with
any `core.ports.Runner`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from headrace.core.events import Finished, Stepped
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.ports import Runner
from headrace.core.request import Request
from headrace.lab.bench.engine import Loop
from headrace.lab.bench.stats import Spread, spread


class Stopwatch:
    """A `core.ports.Runner` that forwards all calls and records their times.

    ``began`` is the start of the last `launch`, ``ended`` the end of the last `collect`; ``launching`` and
    ``collecting`` are the total seconds spent in them.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self.began = self.ended = clock()
        self.launching = self.collecting = 0.0

    def launch(self, plan: StepPlan, now: float) -> None:
        self.began = self._clock()
        self._runner.launch(plan, now)
        self.launching += self._clock() - self.began

    def collect(self) -> StepOutput:
        began = self._clock()
        output = self._runner.collect()
        self.ended = self._clock()
        self.collecting += self.ended - began
        return output


class NotOneBatch(RuntimeError):
    """The requests did not decode as one batch: too few slots or blocks, or the outputs are too short."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one kind: their duration, and the mean seconds of each part of a step.

    ``parts`` are ``plan``, ``launch``, ``collect`` and ``commit``; without overlap they add up to a step. ``phases``
    are reported by the runner: inside ``launch`` and ``collect``, or parallel to them in a background thread.
    """

    kind: str
    wall: Spread
    parts: Mapping[str, float]
    phases: Mapping[str, float]

    @property
    def outside_forward(self) -> float:
        """Mean seconds of a step outside the model's forward pass."""
        return self.wall.mean - self.phases.get("forward", 0.0)


def time_steps(
    loop: Loop,
    stopwatch: Stopwatch,
    phases: Callable[[], Mapping[str, float]],
    requests: Sequence[Request],
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepTimes]:
    """Runs one batch to its end and times its steps: those that prefill, and those that only decode.

    All requests arrive at once; decode steps count while every request decodes. ``phases`` reads the runner's
    cumulative seconds by phase (of a `LocalRunner`: its ``seconds``).

    Raises:
        NotOneBatch: no step decoded all of them.
    """
    for request in requests:
        loop.submit(request, clock())
    prefill, decode = _Bin(), _Bin()
    open_ = len(requests)
    while open_:
        before, launching, collecting = dict(phases()), stopwatch.launching, stopwatch.collecting
        start = clock()
        events = loop.step(start)
        end = clock()
        open_ -= sum(type(event) is Finished for event in events)
        stepped = next((event for event in events if type(event) is Stepped), None)
        if stepped is None:
            continue
        bin_ = prefill if stepped.prefill_rows else decode
        if stepped.prefill_rows or stepped.decode_rows == len(requests):
            parts = {
                "plan": stopwatch.began - start if stopwatch.began >= start else 0.0,
                "launch": stopwatch.launching - launching,
                "collect": stopwatch.collecting - collecting,
                "commit": end - stopwatch.ended,
            }
            bin_.add(end - start, parts, {name: total - before[name] for name, total in phases().items()})
    if not decode.walls:
        raise NotOneBatch(
            f"no step decoded all {len(requests)} requests: raise --max-num-seqs or --kv-cache-memory-bytes"
        )
    return [prefill.times("prefill"), decode.times("decode")]


class _Bin:
    """Steps of one kind, summed."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self._parts: dict[str, float] = {}
        self._phases: dict[str, float] = {}

    def add(self, wall: float, parts: Mapping[str, float], phases: Mapping[str, float]) -> None:
        self.walls.append(wall)
        for sums, more in ((self._parts, parts), (self._phases, phases)):
            for name, seconds in more.items():
                sums[name] = sums.get(name, 0.0) + seconds

    def times(self, kind: str) -> StepTimes:
        count = len(self.walls) or 1
        return StepTimes(
            kind,
            spread(self.walls),
            {name: total / count for name, total in self._parts.items()},
            {name: total / count for name, total in self._phases.items()},
        )


def latency_table(times: Sequence[StepTimes], title: str) -> Table:
    """Milliseconds per step and their share of it, one column per kind of step."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    shown.add_column("ms per step (share)")
    for each in times:
        shown.add_column(f"{each.kind} ({each.wall.count} steps)", justify="right")
    rows: list[tuple[str, Callable[[StepTimes], float]]] = [
        ("step, mean", lambda t: t.wall.mean),
        ("step, p50", lambda t: t.wall.p50),
        ("step, p99", lambda t: t.wall.p99),
        *((f"  {name}", lambda t, name=name: t.parts.get(name, 0.0)) for name in times[0].parts),
        *((f"  runner: {name}", lambda t, name=name: t.phases.get(name, 0.0)) for name in times[0].phases),
        ("outside the forward pass", lambda t: t.outside_forward),
    ]
    for label, read in rows:
        cells = [f"{1000 * read(t):.3f} ({100 * read(t) / t.wall.mean:.0f} %)" for t in times]
        shown.add_row(label, *cells)
    return shown
