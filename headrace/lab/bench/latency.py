"""The time of a step, part by part, measured and as bounds of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

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


Term = Literal["bandwidth", "arithmetic", "overhead"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates of a machine.

    ``read`` is the memory bandwidth in bytes per second by number of threads; ``products`` are operations per second of
    matrix products (a multiply-add counts as two) by data type and implementation.
    """

    read: Mapping[int, float]
    products: Mapping[str, Mapping[str, float]]

    @property
    def bandwidth(self) -> float:
        return max(self.read.values())

    def peak(self, numbers: str) -> float:
        """Operations per second of the fastest implementation for a data type."""
        return max(self.products[numbers].values())


def mean_rates(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The mean of two measurements of the memory bandwidth, by number of threads."""
    return {threads: (rate + other[threads]) / 2 for threads, rate in one.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: its seconds, the bytes it must read, and its ``operations`` by data type.

    Several data types are alternatives: each could compute the whole part.
    """

    name: str
    seconds: float
    bytes: float = 0.0
    operations: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """A part of a step and its lower bounds on a machine, in seconds."""

    name: str
    seconds: float
    bandwidth: float
    arithmetic: float

    @property
    def allowed(self) -> float:
        return max(self.bandwidth, self.arithmetic)

    @property
    def overhead(self) -> float:
        return max(0.0, self.seconds - self.allowed)

    @property
    def share(self) -> float:
        """The bound as a share of the measured time."""
        return self.allowed / self.seconds if self.seconds else 0.0

    @property
    def held_by(self) -> Term:
        """The largest of the three terms: what an optimization should address."""
        return _largest(self.bandwidth, self.arithmetic, self.overhead)


@dataclass(frozen=True, slots=True)
class Step:
    """Mean of ``count`` steps of one kind, with ``batch`` rows of ``context`` tokens.

    ``seconds`` is the time of a whole step in the engine; the ``parts`` were timed one by one. ``bandwidth`` is the
    memory bandwidth that bounds them, in bytes per second. ``shares`` are those of all rounds, if it is one of several.
    """

    kind: str
    batch: int
    context: int
    count: int
    seconds: float
    parts: tuple[Bound, ...]
    bandwidth: float
    shares: tuple[float, ...] = ()

    @property
    def allowed(self) -> float:
        """Sum of the parts' bounds: reads of one part do not overlap with arithmetic of another."""
        return sum(part.allowed for part in self.parts)

    @property
    def share(self) -> float:
        """The bound as a share of the measured time."""
        return self.allowed / self.seconds

    @property
    def held_by(self) -> Term:
        """The largest term of the step, in which each part counts with the term that bounds it."""
        bandwidth = sum(part.allowed for part in self.parts if part.bandwidth >= part.arithmetic)
        return _largest(bandwidth, self.allowed - bandwidth, self.seconds - self.allowed)


def _largest(bandwidth: float, arithmetic: float, overhead: float) -> Term:
    terms: dict[Term, float] = {"bandwidth": bandwidth, "arithmetic": arithmetic, "overhead": overhead}
    return max(terms, key=lambda term: terms[term])


def middle(rounds: Sequence[Step]) -> Step:
    """The step of the median share (the lower one of an even number), with the shares of all rounds."""
    in_order = sorted(rounds, key=lambda step: step.share)
    return replace(in_order[(len(rounds) - 1) // 2], shares=tuple(step.share for step in rounds))


def bound(part: Part, machine: Machine) -> Bound:
    """The bounds of a part on a machine, in the part's fastest data type."""
    arithmetic = min((count / machine.peak(type_) for type_, count in part.operations.items()), default=0.0)
    return Bound(part.name, part.seconds, part.bytes / machine.bandwidth, arithmetic)


def prompt_keys(length: int, window: int | None) -> float:
    """Number of query-key pairs of a prompt with causal attention within the window."""
    reach = min(length, window or length)
    return reach * (length - (reach - 1) / 2)


def machine_table(machine: Machine) -> Table:
    """The measured rates as a table."""
    shown = Table(title="the machine", title_justify="left", header_style="bold")
    shown.add_column("")
    shown.add_column("measured", justify="right")
    for threads, rate in machine.read.items():
        shown.add_row(
            f"memory read by {threads} thread{'s' if threads > 1 else ''}", f"{rate / 1e9:.1f} GB/s"
        )
    for numbers, rates in machine.products.items():
        for implementation, rate in rates.items():
            shown.add_row(f"{numbers} products, {implementation}", f"{rate / 1e12:.2f} T/s")
    return shown


def step_table(step: Step) -> Table:
    """A step's parts in milliseconds."""
    title = (
        f"{step.kind}: batch {step.batch}, context {step.context}, mean of {step.count} steps; memory read at"
        f" {step.bandwidth / 1e9:.1f} GB/s; milliseconds"
    )
    if len(step.shares) > 1:
        title += f"; {len(step.shares)} rounds reached {min(step.shares):.0%} to {max(step.shares):.0%}"
    shown = Table(title=title, title_justify="left", header_style="bold")
    shown.add_column("part")
    for column in ("bandwidth", "arithmetic", "allowed", "takes", "share", "held by"):
        shown.add_column(column, justify="right")
    for part in step.parts:
        cells = [_ms(part.bandwidth), _ms(part.arithmetic), _ms(part.allowed), _ms(part.seconds)]
        shown.add_row(part.name, *cells, f"{part.share:.0%}", part.held_by)
    shown.add_section()
    shown.add_row(
        "whole step", "", "", _ms(step.allowed), _ms(step.seconds), f"{step.share:.0%}", step.held_by
    )
    return shown


def document(machine: Machine, steps: Sequence[Step]) -> dict[str, object]:
    """Machine and steps as plain values, in seconds."""
    return {
        "machine_read_bytes_per_second": dict(machine.read),
        "machine_operations_per_second": {name: dict(rates) for name, rates in machine.products.items()},
        "steps": [
            {
                "kind": step.kind,
                "batch": step.batch,
                "context": step.context,
                "count": step.count,
                "seconds": step.seconds,
                "read_bytes_per_second": step.bandwidth,
                "allowed_seconds": step.allowed,
                "shares": list(step.shares),
                "parts": [
                    {
                        "name": part.name,
                        "seconds": part.seconds,
                        "bandwidth_seconds": part.bandwidth,
                        "arithmetic_seconds": part.arithmetic,
                        "held_by": part.held_by,
                    }
                    for part in step.parts
                ],
            }
            for step in steps
        ],
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds else "-"
