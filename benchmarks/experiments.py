"""False alarms and power of experiments whose true effect is known.

``simulated``: 200 experiments of each design without a difference, evaluated after every pair or second, and 100 with a
difference. By time: windows of a load that drifts (autocorrelation 0.8, spread 15 %), with 5 % noise; and in a closed
loop, where clients wait for responses, a speed of the server that drifts so. By request and by tenant: 8 tenants that
differ, ten requests per second of different sizes, a load that drifts, with 30 % noise.

``live``: a server with the built-in model, and clients that send one request after the other. The setting under test
has no effect; the treatment makes each step longer by a planted share.

    python -m benchmarks.experiments simulated [--runs 200]
    python -m benchmarks.experiments live [--seconds 150]      # less than 8 minutes
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import httpx

from benchmarks.stage import plain_parser
from headrace.config import options
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.lab.bench.stats import percentile
from headrace.tuning.experiment import LATENCY, Split, Status, Switchback
from headrace.tuning.measures import Unit
from headrace.tuning.spec import Spec
from headrace.wiring.server import build_app

PAIRS, WINDOW, BURN_IN = 120, 30.0, 5.0
UNITS_PER_SECOND = 10
UNIT_SECONDS = 3600.0
CLIENTS = 8
ANSWER = "output_tokens_per_second"


class Outcome(NamedTuple):
    """The result of one experiment: its status, number of measurements, and duration in seconds."""

    status: Status
    measured: int
    seconds: float


def by_time(seed: int, effect: float, closed: bool = False) -> Outcome:
    """One switchback experiment; ``effect`` is the logarithm of the true change.

    In a ``closed`` loop, load and latency follow the speed of the server. Otherwise both rise with the load.
    """
    rng, load = random.Random(seed), 0.0
    longest = PAIRS * 2 * (WINDOW + BURN_IN) + 1.0
    spec = Spec("x", 1, 2, ANSWER, {}, WINDOW, BURN_IN, longest, seed=seed)
    experiment = Switchback("e", spec, 0.0)

    def close(now: float) -> tuple[dict[str, float], float]:
        nonlocal load
        load = 0.8 * load + 0.6 * rng.gauss(0, 0.15)
        on = experiment.arm == "treatment"
        speed = load + on * effect + rng.gauss(0, 0.05)
        latency = (-speed if closed else 0.3 * load - on * effect) + rng.gauss(0, 0.02)
        values = {ANSWER: 1000 * math.exp(speed), LATENCY: math.exp(latency)}
        return values, 1000 * math.exp((speed if closed else load) + rng.gauss(0, 0.02))

    experiment.meter.close = close  # type: ignore[attr-defined]
    now = 0.0
    while experiment.status is Status.RUNNING:
        now = experiment.due
        experiment.advance(now)
    return Outcome(experiment.status, len(experiment.pairs), now)


def by_unit(unit: str, seed: int, effect: float) -> Outcome:
    """One experiment by request, or by tenant with periods of ten seconds."""
    rng, load, number, now = random.Random(seed), 0.0, 0, 0.0
    tenants = [rng.gauss(0, 0.5) for _ in range(8)]
    longest = UNIT_SECONDS * (10 if unit == "tenant" else 1)
    spec = Spec("x", 1, 2, "e2e_mean_seconds", window_seconds=10.0, max_seconds=longest, seed=seed, unit=unit)
    experiment = Split("e", spec, 0.0)
    arms = experiment.assignment
    assert arms is not None
    while experiment.status is Status.RUNNING:
        now = experiment.due
        load = 0.95 * load + 0.3 * rng.gauss(0, 0.3)
        many = UNITS_PER_SECOND if unit == "request" else 8 if not int(now) % 10 else 0
        for at in range(many):
            tenant = at if unit == "tenant" else rng.randrange(8)
            number += 1
            treated = arms.treats(arms.unit(f"r{number}", f"t{tenant}", now))
            size = rng.gauss(4, 1) if unit == "request" else rng.gauss(4, 0.2)
            value = size + tenants[tenant] + load + treated * effect + rng.gauss(0, 0.3)
            seen = load + rng.gauss(0, 0.1)
            experiment.add(Unit(f"t{tenant}", treated, {"e2e_mean_seconds": value}, (size, seen)))
        experiment.advance(now)
    return Outcome(experiment.status, experiment.effect.count, now)


def simulated(runs: int) -> None:
    """Print false alarms, power and time to decision of each design."""
    designs: dict[str, Callable[[int, float], Outcome]] = {
        "time": by_time,
        "closed": lambda seed, effect: by_time(seed, effect, closed=True),
        "request": lambda seed, effect: by_unit("request", seed, effect),
        "tenant": lambda seed, effect: by_unit("tenant", seed, effect),
    }
    print(
        "unit      A/A runs  false alarms  A/B runs  found   wrong sign  median units  median minutes  p90 minutes"
    )
    for name, design in designs.items():
        alarms = sum(design(seed, 0.0).status is not Status.UNDECIDED for seed in range(runs))
        ab = [design(10_000 + seed, math.log(1.05)) for seed in range(runs // 2)]
        right = Status.BETTER if name in ("time", "closed") else Status.WORSE
        found = [each for each in ab if each.status is right]
        wrong = sum(each.status not in (right, Status.UNDECIDED) for each in ab)
        minutes = [each.seconds / 60 for each in found] or [math.nan]
        print(
            f"{name:<10}{runs:<10}{alarms / runs:<14.1%}{len(ab):<10}{len(found) / len(ab):<8.0%}{wrong:<12}"
            f"{median([each.measured for each in found] or [0]):<14.0f}{median(minutes):<16.1f}"
            f"{percentile(minutes, 90):.1f}"
        )


# -- live ------------------------------------------------------------------------------------------

SLOW: dict[int, float] = {}
"""By value of ``max_running``: the share by which each step is longer."""


def plant_slowdown() -> None:
    """Slow down the steps of the engine while the setting has a planted value."""
    step = Engine.step

    def slowed(self: Engine, now: float) -> list[Event]:
        began = time.perf_counter()
        events = step(self, now)
        share = SLOW.get(self.knobs.max_running, 0.0)
        if share:
            until = time.perf_counter() + share * (time.perf_counter() - began)
            while time.perf_counter() < until:  # a sleep of so short a time is much longer
                pass
        return events

    Engine.step = slowed  # type: ignore[method-assign]


async def client(api: httpx.AsyncClient, number: int) -> None:
    """Send request after request."""
    for count in itertools.count():
        body = {"prompt": f"Once upon a time {number} {count}", "max_tokens": 64, "ignore_eos": True}
        (await api.post("/v1/completions", json=body)).raise_for_status()


async def experiment(api: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Run one experiment to its end; its report."""
    started = await api.post("/v1/experiments", json=body)
    started.raise_for_status()
    while True:
        await asyncio.sleep(0.2)
        report: dict[str, Any] = (await api.get(f"/v1/experiments/{started.json()['id']}")).json()
        if report["status"] != "running":
            return report


def planted(seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The experiments: without a difference, slowdowns of 20 % and 8 %, and a regression beyond a guard."""
    usual = {"setting": "max_running", "metric": ANSWER, "window_seconds": 2.0, "burn_in_seconds": 0.5}
    guards = {"itl_mean_seconds": 0.25}
    yield "no difference", usual | {"treatment": 61, "max_seconds": seconds}
    SLOW[60], SLOW[62], SLOW[63] = 0.087, 0.25, 1.0
    yield "steps 25 % longer: 20 % fewer tokens a second", usual | {"treatment": 62, "max_seconds": seconds}
    yield "steps 8.7 % longer: 8 % fewer", usual | {"treatment": 60, "max_seconds": seconds}
    yield (
        "steps twice as long, guard 25 %",
        usual | {"treatment": 63, "max_seconds": seconds, "guards": guards},
    )


async def live(seconds: float) -> None:
    """Serve the built-in model in this process, with clients, and run the experiments."""
    plant_slowdown()
    app, running = build_app(options({"model": "builtin", "max_num_seqs": 64, "access_log": False}))
    transport = httpx.ASGITransport(app=app)
    async with running, httpx.AsyncClient(transport=transport, base_url="http://live", timeout=60.0) as api:
        clients = [asyncio.create_task(client(api, number)) for number in range(CLIENTS)]
        await asyncio.sleep(3.0)
        for name, body in planted(seconds):
            report = await experiment(api, body)
            change, took = report["effect"]["change"], report["log"][-1]["seconds"]
            interval = report["effect"]["interval"]
            shown = "" if interval is None else f" ({interval[0]:+.1%} to {interval[1]:+.1%})"
            print(
                f"{name}: {report['status']} after {report['pairs']} pairs and {took:.0f} s, "
                f"{ANSWER} {change:+.1%}{shown}; {report['why']}",
                flush=True,
            )
        for each in clients:
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each


def main() -> None:
    """Run the measurement that the command line names."""
    parser = plain_parser(__doc__)
    parser.add_argument("what", choices=("simulated", "live"))
    parser.add_argument(
        "--runs", type=int, default=200, help="experiments without a difference (default: 200)"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="longest live experiment (default: 150)")
    given = parser.parse_args()
    if given.what == "simulated":
        simulated(given.runs)
    else:
        asyncio.run(live(given.seconds))


if __name__ == "__main__":
    main()
