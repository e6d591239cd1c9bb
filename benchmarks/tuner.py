"""The tuner in virtual time: loads x (as started, tuned, best fixed setting), on a simulated device.

The best fixed setting is found by simulating a grid of the settings that the tuner may change. The figure is the time
per generated token as clients see it (`normalized_latency_seconds`) over the last third of the run, when the tuner has
had time to work. ``worst window`` is the largest ratio of tuned to untuned over tenths of the run.

    python -m benchmarks.tuner [--hours 0.5] [--start mixed_prefill_ratio=0.05]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headrace.build.simulation import make_fleet, roofline_machine
from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.engine import Engine
from headrace.lab.plan.devices import device
from headrace.lab.plan.roofline import Replica
from headrace.lab.plan.shapes import SHAPES
from headrace.lab.simulate.requests import from_calls
from headrace.lab.workload import population
from headrace.lab.workload.synthesis import Synthesis
from headrace.observe.steering.engine import Steering
from headrace.observe.steering.settings import live_settings
from headrace.observe.tuner.tuner import Mode

LOADS = {
    "light": "tenant=a,rate=6,arrivals=poisson,prompt=uniform:100:800,answer=uniform:20:100",
    "heavy": "tenant=a,rate=40,arrivals=poisson,prompt=uniform:100:800,answer=uniform:20:100",
    "long prompts": "tenant=a,rate=5,arrivals=poisson,prompt=uniform:2000:6000,answer=uniform:20:60",
    "bursty": "tenant=a,rate=20,arrivals=bursty:4,prompt=uniform:100:1500,answer=uniform:20:100",
    "on and off": "tenant=a,rate=15,arrivals=mmpp:4:120,prompt=uniform:100:1500,answer=uniform:20:100",
}
GRID: dict[str, tuple[float, ...]] = {
    "mixed_prefill_ratio": (0.2, 0.7, 2.5),
    "max_num_batched_tokens": (512, 2048, 8192),
}
TENTHS = 10


def run(
    load: str, hours: float, plans: SchedulerOptions, mode: Mode
) -> tuple[list[dict[str, Any]], list[str]]:
    """The requests' rows, and the tuner's log."""
    seconds = hours * 3600
    calls = itertools.takewhile(
        lambda call: call.arrival < seconds, population.calls([population.parse(load)], 1 << 30, 1)
    )
    machine_replica = Replica(SHAPES["llama-3.1-8b"], device("H100-SXM"))
    cache = CacheOptions()
    machine = roofline_machine(machine_replica, cache, plans, 16384)
    made: list[Steering] = []

    def steer(engine: Engine) -> Steering:
        settings, count = live_settings(plans.max_num_seqs), itertools.count()
        made.append(Steering(settings, lambda: engine.knobs, lambda: f"exp_{next(count)}", mode, 10.0, 2.0))
        return made[0]

    fleet = make_fleet(plans, cache, machine, with_rows=True, steer=steer)
    fleet.run(from_calls(calls, Synthesis(seed=1), None))
    return fleet.tally.rows, [f"{note.at:7.0f} s  {note.what}" for note in made[0].tuner.notes]


def latency(rows: list[dict[str, Any]], low: float, high: float) -> float:
    """Seconds per generated token of the requests that arrived in a part of the run."""
    part = [
        row for row in rows if low <= row["arrived_seconds"] < high and row.get("e2e_seconds") is not None
    ]
    seconds: float = sum(row["e2e_seconds"] for row in part)
    tokens: int = sum(row["output_tokens"] for row in part)
    return seconds / tokens


def _grid(plans: SchedulerOptions) -> Iterator[SchedulerOptions]:
    for chosen in itertools.product(*GRID.values()):
        given: dict[str, Any] = dict(zip(GRID, chosen, strict=True))
        yield replace(plans, **given)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=0.5, help="of virtual time")
    parser.add_argument("--start", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--only", choices=list(LOADS), action="append")
    parser.add_argument(
        "--oracle-hours", type=float, default=0.1, help="of virtual time, per point of the grid"
    )
    parser.add_argument("--log", action="store_true", help="print what the tuner did")
    args = parser.parse_args()
    started = {name: float(value) for name, value in (each.split("=") for each in args.start)}
    whole: dict[str, Any] = {
        name: int(value) if name.startswith("max_num") else value for name, value in started.items()
    }
    plans = SchedulerOptions(max_num_seqs=256, **whole)
    print(
        f"{'load':14} {'start ms':>9} {'tuned ms':>9} {'best ms':>9} {'gain':>7} {'of best':>8} {'worst tenth':>11}"
    )
    for name in args.only or LOADS:
        load, end = LOADS[name], args.hours * 3600
        before, _ = run(load, args.hours, plans, Mode.OFF)
        after, log = run(load, args.hours, plans, Mode.ON)
        late = (end * 2 / 3, end)
        old, new = latency(before, *late), latency(after, *late)
        best = min(latency(run(load, args.oracle_hours, each, Mode.OFF)[0], 60, 1e9) for each in _grid(plans))
        parts = [(end * i / TENTHS, end * (i + 1) / TENTHS) for i in range(TENTHS)]
        worst = max(latency(after, *part) / latency(before, *part) for part in parts)
        possible = old - best
        share = f"{(old - new) / possible:8.0%}" if possible > 0.02 * old else "       -"
        print(
            f"{name:14} {old * 1e3:9.2f} {new * 1e3:9.2f} {best * 1e3:9.2f} {old / new:7.3f} {share} {worst:11.3f}",
            flush=True,
        )
        if args.log:
            print("\n".join(log))


if __name__ == "__main__":
    main()
