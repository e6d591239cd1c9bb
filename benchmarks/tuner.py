"""The tuner in virtual time: loads x (as started, tuned, best fixed settings), on a simulated device.

    python -m benchmarks.tuner [--hours 1.5] [--start max_num_batched_tokens=256] [--only step] [--seed 1] [--jobs 2]
        [--azure FILE] [--servegen FILE] [--log]

The figure is the time per generated token as clients see it, in milliseconds, in the last third of the run, when the
tuner has had time to work. The oracle is the best point of a grid of fixed settings on the requests of that third. The
share of its gain that the tuner reaches is shown where the oracle gains 2 % or more. `whole` and `worst tenth` are
started over tuned for the whole run and for its worst tenth: above 1 the tuner was faster. `changes` counts all changes
of settings, and `turns` those that reverse the change before. `CPU` is the tuner's processor time per virtual time.

| load | what it is |
|---|---|
| steady, step, ramp | Poisson arrivals whose rate is constant, doubles, or rises |
| diurnal, oscillating | Poisson arrivals whose rate swings once, or alternates every ten minutes |
| bursty | bursts of about ten requests |
| noisy | steady, each step's time with 20 % of noise |
| delayed | steady, the tuner sees all events half a minute late |
| azure, servegen | published traces, at the same mean rate of requests, or of tokens if that is less |
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.stage import markdown_head, markdown_row, plain_parser
from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.lab.plan.roofline import SHAPES, Replica, device
from headrace.lab.simulate.runner import Device, StepWork, from_calls
from headrace.lab.workload.traces import read_trace
from headrace.lab.workload.work import Call, Synthesis, speedup
from headrace.tuning.engine_tuning import EngineTuning
from headrace.tuning.scheduler_model import evaluate
from headrace.tuning.settings import Change, live_settings
from headrace.tuning.tuner import Mode
from headrace.wiring.simulation import make_fleet, roofline_machine

RATE = 3.0
"""Requests per second in the mean; about three quarters of what the device sustains."""

PROMPT, OUTPUT = (200, 1800), (20, 100)
MEAN_TOKENS = sum(PROMPT + OUTPUT) / 2
"""Tokens of a request that is made up: least and most of a prompt and of an output, and the mean of both together."""

RATES: Mapping[str, Callable[[float], float]] = {
    "steady": lambda share: RATE,
    "step": lambda share: RATE * (0.67 if share < 0.4 else 1.33),
    "ramp": lambda share: RATE * (0.4 + 1.2 * share),
    "diurnal": lambda share: RATE * (1 + 0.6 * math.sin(2 * math.pi * share)),
    "oscillating": lambda share: RATE,
    "bursty": lambda share: RATE,
    "noisy": lambda share: RATE,
    "delayed": lambda share: RATE,
}
"""Requests per second as a function of the share of the run that is over."""

BURST = 10
NOISE = 0.2
DELAY = 30.0
SWING_SECONDS = 600.0
SWINGS = (1.5, 0.5)
"""An oscillating load has one of these multiples of the mean rate, each for `SWING_SECONDS`."""

GRID: Mapping[str, tuple[float, ...]] = {
    "mixed_prefill_ratio": (0.1, 0.16, 0.25, 0.45, 1.2),
    "max_num_batched_tokens": (512, 2048),
}
WINDOW = 20.0
STEPS_PER_PAUSE = 1000
"""Steps that a process rehearses between two looks of the tuner, at 10 microseconds a step."""
TENTHS = 10
COLUMNS = (
    *("load", "start ms", "tuned ms", "oracle ms", "share of oracle's gain"),
    *("whole", "worst tenth", "changes", "turns", "CPU"),
)


class Load(NamedTuple):
    """A load by name; ``trace`` is the file of a published one."""

    name: str
    trace: Path | None = None

    def calls(self, seconds: float, seed: int = 1) -> list[Call]:
        """Its requests in so many seconds."""
        if self.trace is not None:
            calls = list(read_trace(self.trace))
            tokens = sum(each.prompt_tokens + each.output_tokens for each in calls) / len(calls)
            faster = RATE * min(1.0, MEAN_TOKENS / tokens) * calls[-1].arrival / len(calls)
            return [each for each in _rotated(list(speedup(calls, faster)), seed) if each.arrival < seconds]
        return list(self._synthetic(seconds, random.Random(seed)))

    def _synthetic(self, seconds: float, rng: random.Random) -> Iterator[Call]:
        rate, most, now = RATES[self.name], 2 * RATE, 0.0
        burst = BURST if self.name == "bursty" else 1
        while (now := now + rng.expovariate(most / burst)) < seconds:
            swing = SWINGS[int(now / SWING_SECONDS) % 2] if self.name == "oscillating" else 1.0
            if rng.random() * most < swing * rate(now / seconds):
                for _ in range(burst):
                    yield Call(now, rng.randint(*PROMPT), rng.randint(*OUTPUT))


def _rotated(calls: Sequence[Call], seed: int) -> list[Call]:
    """A trace that begins elsewhere, and goes on with its beginning after its end; seed 1: at its beginning."""
    whole = calls[-1].arrival
    began = random.Random(seed).random() * whole if seed > 1 else 0.0
    moved = (each._replace(arrival=(each.arrival - began) % whole) for each in calls)
    return sorted(moved, key=lambda each: each.arrival)


class NoisyDevice:
    """A device whose steps take longer or shorter by chance."""

    def __init__(self, inner: Device) -> None:
        self._inner, self._rng = inner, random.Random(0)

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step."""
        return self._inner.seconds(work) * math.exp(self._rng.gauss(0.0, NOISE))

    def host_seconds(self, work: StepWork) -> float:
        """Seconds of its planning."""
        return self._inner.host_seconds(work)


class Recorded(EngineTuning):
    """Keeps its changes, as setting and whether it was raised, and the processor time that it took."""

    changes: list[tuple[str, bool]]
    cpu_seconds = 0.0

    def tick(self, now: float) -> Change | None:
        """Keep the change that is due."""
        began = time.thread_time()
        change = super().tick(now)
        self.cpu_seconds += time.thread_time() - began
        if change is not None:
            before = self.present()[change.setting]
            self.changes = [*getattr(self, "changes", []), (change.setting, float(change.value) > before)]
        return change


class Late(Recorded):
    """EngineTuning that sees all events `DELAY` seconds late."""

    _mail: deque[tuple[float, list[Event]]]

    def saw(self, events: Any, now: float) -> None:
        """Measure what happened half a minute ago."""
        self._mail = getattr(self, "_mail", None) or deque()
        self._mail.append((now, list(events)))
        while self._mail[0][0] <= now - DELAY:
            super().saw(self._mail.popleft()[1], now)


class Ran(NamedTuple):
    """Arrival, time and tokens of each request; the tuner's log, its changes as setting and direction, its CPU time."""

    requests: list[tuple[float, float, int]]
    log: list[str]
    changes: list[tuple[str, bool]]
    cpu_seconds: float

    def latency(self, low: float, high: float) -> float:
        """Seconds per generated token of the requests that arrived in a part of the run."""
        part = [each for each in self.requests if low <= each[0] < high]
        return sum(each[1] for each in part) / max(1, sum(each[2] for each in part))


def run(load: Load, calls: Sequence[Call], plans: SchedulerOptions, mode: Mode) -> Ran:
    """Simulate the requests with or without the tuner."""
    replica = Replica(SHAPES["llama-3.1-70b"], device("A100-80G"), 4)
    machine = roofline_machine(replica, CacheOptions(), plans, 16384)
    if load.name == "noisy":
        machine = replace(machine, device=NoisyDevice(machine.device))
    made: list[Recorded] = []

    def steer(engine: Engine) -> EngineTuning:
        kind = Late if load.name == "delayed" else Recorded
        settings = live_settings(plans.max_num_seqs)
        # In the server this runs in a process of its own.
        model = partial(evaluate, overlap=engine.overlap, steps=STEPS_PER_PAUSE)
        made.append(
            kind(settings, lambda: engine.knobs, str, mode, WINDOW, times=engine.times, evaluate=model)
        )
        return made[0]

    steered = steer if mode is Mode.ON else None
    fleet = make_fleet(plans, CacheOptions(), machine, with_rows=True, steer=steered)
    fleet.run(from_calls(calls, Synthesis(seed=1), None))
    rows = [
        (row["arrived_seconds"], row["e2e_seconds"], row["output_tokens"])
        for row in fleet.tally.rows
        if row.get("e2e_seconds") is not None
    ]
    if not made:
        return Ran(rows, [], [], 0.0)
    log = [f"{note.at:7.0f} s  {note.what}" for note in made[0].tuner.notes]
    return Ran(rows, log, getattr(made[0], "changes", []), made[0].cpu_seconds)


class Row(NamedTuple):
    """A row of the table; latencies in seconds per token."""

    load: str
    started: float
    tuned: float
    oracle: float
    whole: float
    worst: float
    changes: int
    turns: int
    cpu: float
    log: list[str]

    @property
    def share(self) -> float:
        """The share of the oracle's gain that the tuner has reached; NaN where there is less than 2 % to gain."""
        gain = self.started - self.oracle
        return (self.started - self.tuned) / gain if gain > 0.02 * self.started else math.nan


def row(load: Load, hours: float, plans: SchedulerOptions, seed: int) -> Row:
    """Simulate one load as started, tuned, and on the grid."""
    calls = load.calls(hours * 3600, seed)
    end = calls[-1].arrival
    before, after = (run(load, calls, plans, mode) for mode in (Mode.OFF, Mode.ON))
    late = end * 2 / 3
    old, new = before.latency(late, end), after.latency(late, end)
    cuts = [(end * i / TENTHS, end * (i + 1) / TENTHS) for i in range(TENTHS)]
    turns = sum(one[0] == two[0] and one[1] != two[1] for one, two in itertools.pairwise(after.changes))
    return Row(
        load.name,
        old,
        new,
        min(old, _oracle(load, calls, late, plans)),
        before.latency(0, end) / after.latency(0, end),
        min(before.latency(*each) / after.latency(*each) for each in cuts),
        len(after.changes),
        turns,
        after.cpu_seconds / end,
        after.log,
    )


def _oracle(load: Load, calls: Sequence[Call], late: float, plans: SchedulerOptions) -> float:
    """Seconds per token with the best fixed settings of the grid, on the requests from ``late`` on."""
    part = [each._replace(arrival=each.arrival - late) for each in calls if each.arrival >= late]
    best = math.inf
    for chosen in itertools.product(*GRID.values()):
        given: dict[str, Any] = dict(zip(GRID, chosen, strict=True))
        best = min(best, run(load, part, replace(plans, **given), Mode.OFF).latency(0, math.inf))
    return best


def main() -> None:
    """Simulate and print."""
    parser = plain_parser(__doc__)
    parser.add_argument("--hours", type=float, default=1.5, help="of virtual time")
    parser.add_argument("--start", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--only", action="append", choices=[*RATES, "azure", "servegen"])
    parser.add_argument("--azure", type=Path, help="trace azure_llm_2023_conv")
    parser.add_argument("--servegen", type=Path, help="trace of ServeGen")
    parser.add_argument("--seed", type=int, default=1, help="of the requests; where a trace begins")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--log", action="store_true", help="print what the tuner did")
    args = parser.parse_args()
    whole: dict[str, Any] = {
        name: int(value) if name.startswith("max_num") else float(value)
        for name, value in (each.split("=") for each in args.start)
    }
    plans = replace(SchedulerOptions(max_num_seqs=256), **whole)
    traces = {"azure": args.azure, "servegen": args.servegen}
    loads = [Load(name) for name in RATES] + [Load(name, file) for name, file in traces.items() if file]
    chosen = [each for each in loads if not args.only or each.name in args.only]
    print(markdown_head(COLUMNS))
    with ProcessPoolExecutor(args.jobs) as pool:
        for each in pool.map(row, chosen, *map(itertools.repeat, (args.hours, plans, args.seed))):
            share = "-" if math.isnan(each.share) else f"{each.share:.0%}"
            times = (f"{1e3 * seconds:.2f}" for seconds in (each.started, each.tuned, each.oracle))
            ratios, cpu = (f"{each.whole:.3f}", f"{each.worst:.3f}"), f"{each.cpu:.1%}"
            print(
                markdown_row((each.load, *times, share, *ratios, each.changes, each.turns, cpu)), flush=True
            )
            if args.log:
                print("\n".join(each.log))


if __name__ == "__main__":
    main()
