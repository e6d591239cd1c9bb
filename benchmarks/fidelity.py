"""How well the simulator predicts a real server: one trace at several loads, measured over HTTP and simulated.

The machine is calibrated on made-up work (as by `headrace bench calibrate`), never on the trace that is predicted. A
closed loop finds what the server can do; the trace is then replayed at shares of that. Without ``--model`` the server
runs SmolLM2-135M's shape with random weights. Without ``--trace`` a bursty population of log-normal lengths is
replayed.

A shared machine is not equally fast in all minutes, so calibration and measurement alternate: a part is a turn of the
calibration and a round of every load. In every second part the round comes first. A round is predicted twice: with the
calibration of all turns, and with the step times of its own part's turn. No prediction uses what a round measured.

A request is in time if its TTFT and TPOT are within ``--ttft`` and ``--tpot``. Each figure is the median of the
rounds. Its error has a 95 % interval: resampled are the rounds, and stretches of the trace, the same in measured and
simulated rounds. The last column of figures is the difference between two rounds of the same load: no prediction of a
round can be closer than that. ``--loads`` and ``--rounds`` make one command as short as is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks.peers.quiet import FOREIGN, Watched
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.weights import write_config
from benchmarks.stage import Server, arguments, publish, say, server
from headrace.cli.bench.calibrate import EACH_TOKEN, Measuring, describe, measuring
from headrace.cli.bench.targets import make_server_target
from headrace.config import Options, options
from headrace.lab.bench.report import Run
from headrace.lab.bench.report import measure as run_target
from headrace.lab.bench.stats import Target
from headrace.lab.calibration import Calibration, Fit, fit, stream_work
from headrace.lab.simulate.runner import from_work
from headrace.lab.simulate.tally import outcome
from headrace.lab.workload.dataset import VOCABULARY
from headrace.lab.workload.population import calls as population_calls
from headrace.lab.workload.population import parse
from headrace.lab.workload.traces import read_trace
from headrace.lab.workload.work import Call, Synthesis, Work, replayed
from headrace.wiring.simulation import calibrated_machine, make_fleet

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

STREAMS = (1, 4, 16)
"""Streams that the simulated server has computed before, as the server has in the calibration, and then the trace at
once: its scheduler divides prompts by the step times that it has learned from such work."""

RESAMPLES, STRETCH = 400, 10
"""Of the bootstrap, and the length of a stretch of the trace in requests: they wait for each other."""


def main() -> None:
    """Calibrate, measure, simulate, print, write."""
    parser = arguments(__doc__ or "", model="smollm2", rounds=5)
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=160, help="of the trace, in each round")
    parser.add_argument(
        "--scale", type=float, default=0.15, help="of the trace's lengths, for small machines"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="of the capacity")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--ttft", type=float, default=0.5, help="target of a request in seconds")
    parser.add_argument("--tpot", type=float, default=0.025, help="target of a request in seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model == "smollm2":
            args.model = str(write_config(SHAPES["smollm2-135m"], Path(folder)))
        given = options(
            {
                "model": args.model,
                "device": args.device,
                "load_format": "auto" if args.model == "builtin" else "dummy",
                "max_num_seqs": args.max_num_seqs,
                "max_model_len": args.max_model_len,
            }
        )
        flags = ["--max-num-seqs", str(args.max_num_seqs), "--max-model-len", str(args.max_model_len)]
        work = _work(args)
        with server(args, *flags, "--load-format", given.model.load_format) as running:
            measured = _measure(args, given, running, work)
    limits = np.array([args.ttft, args.tpot, math.inf])
    simulate = partial(_simulate, given, limits)
    compared = {}
    for load in args.loads:
        paced, rounds = _paced(work, load * measured.capacity), [part.runs[load] for part in measured.parts]
        compared[f"{load:g}"] = _compare(
            [_real(run, limits) for run in rounds],
            [simulate(measured.machine, paced)] * len(rounds),
            [simulate(part.calibration(measured.machine), paced) for part in measured.parts],
        )
        say(f"{FOREIGN} at {load:g}: {', '.join(str(run.facts[FOREIGN]) for run in rounds)}")
    _show(compared)
    facts: dict[str, Any] = {
        "calibration_us": dataclasses.asdict(measured.machine.at(1e6)),  # seven digits
        "capacity": measured.capacity,
        "figures": {load: [each._asdict() for each in figures] for load, figures in compared.items()},
        "turns_us": [
            dataclasses.asdict(part.calibration(measured.machine).at(1e6)) for part in measured.parts
        ],
    }
    publish("fidelity", args, [run for part in measured.parts for run in part.runs.values()], [], **facts)


class Part(NamedTuple):
    """A turn and a round: the steps' times, and a run of each load."""

    fit: Fit
    runs: Mapping[float, Run]

    def calibration(self, machine: Calibration) -> Calibration:
        """This machine with the step times of this turn; what HTTP costs stays that of all turns."""
        return dataclasses.replace(machine, **dataclasses.asdict(self.fit))


class Measured(NamedTuple):
    """The calibration of all turns, requests per second in a closed loop, and the parts."""

    machine: Calibration
    capacity: float
    parts: Sequence[Part]


def _measure(args: argparse.Namespace, given: Options, running: Server, work: Sequence[Work]) -> Measured:
    """Calibrates and measures in parts."""
    watched = Watched(_target("server", running), lambda: [running.pid])
    with measuring(given, running.url) as machine:
        closed = run_target(_target("closed", running, args.max_num_seqs), _paced(work, math.inf))
        capacity = closed.summary.requests_per_second
        say(f"capacity in a closed loop: {capacity:.2f} requests per second")
        rounds = {load: _paced(work, load * capacity) for load in args.loads}
        parts = [_part(machine, watched, rounds, number) for number in range(args.rounds)]
        calibration = machine.calibration()
    say(describe(calibration))
    return Measured(calibration, capacity, parts)


def _part(machine: Measuring, watched: Watched, rounds: Mapping[float, Sequence[Work]], number: int) -> Part:
    """The ``number``-th part: a turn and then a round of every load, or the reverse."""
    found = fit(machine.turn()) if number % 2 == 0 else None
    runs = {load: run_target(watched, work) for load, work in rounds.items()}
    return Part(found or fit(machine.turn()), runs)


def _work(args: argparse.Namespace) -> list[Work]:
    """The trace's first requests with scaled lengths, all answers as long as theirs."""
    if args.trace is None:
        tenants = [parse("rate=1,arrivals=bursty:0.5,prompt=lognormal:800:0.9,answer=lognormal:150:0.7")]
        calls: Iterator[Call] = population_calls(tenants, args.requests, args.seed + 1)
    else:
        calls = islice(read_trace(args.trace), args.requests)
    limit, scale = int(args.max_model_len) // 2 - 1, float(args.scale)

    def scaled(tokens: int) -> int:
        return max(1, min(limit, round(scale * tokens)))

    small = (
        call._replace(
            prompt_tokens=scaled(call.prompt_tokens),
            output_tokens=scaled(call.output_tokens),
            content=(),
            answer=None,
        )
        for call in calls
    )
    return list(replayed(small, Synthesis(VOCABULARY, args.seed)))


def _target(name: str, running: Server, concurrency: int | None = None) -> Target:
    """The server; a run finds nothing in its prefix cache, as a simulated one does."""

    def forget() -> None:
        httpx.post(f"{running.url}/reset_prefix_cache", timeout=30.0, trust_env=False).raise_for_status()

    return make_server_target(name, running.url, "", "", EACH_TOKEN, concurrency, forget)


def _paced(work: Sequence[Work], rate: float) -> list[Work]:
    """The same arrivals stretched to a mean of ``rate`` per second; infinite: all at once."""
    span = max(each.arrival for each in work) or 1.0
    stretch = 0.0 if rate == math.inf else len(work) / rate / span
    return [dataclasses.replace(each, arrival=each.arrival * stretch) for each in work]


def _simulate(given: Options, limits: Floats, calibration: Calibration, work: Sequence[Work]) -> Figures:
    machine = calibrated_machine(calibration, given.cache, given.model.max_model_len)
    fleet = make_fleet(given.scheduler, given.cache, machine, with_rows=True)
    for seen in (*map(stream_work, STREAMS), _paced(work, math.inf)):
        fleet.warm_up(from_work(seen, fleet.now))
    fleet.run(from_work(work, fleet.now))
    rows = {row["request"]: row for row in fleet.tally.rows}
    times = np.array(
        [[rows[each.id][f"{name}_seconds"] or math.nan for each in work] for name in ("ttft", "tpot", "e2e")]
    )
    return Figures(outcome(fleet.tally, {}).summary.output_tokens_per_second, times, limits)


class Figures(NamedTuple):
    """A round: tokens per second, and in ``times`` TTFT, TPOT (NaN: an output of one token) and E2E of each request.
    A request within all ``limits`` of these is in time."""

    tokens_per_second: float
    times: Floats
    limits: Floats


class Compared(NamedTuple):
    """One figure, measured and simulated with the calibration of all turns. The errors of this prediction and of those
    with the nearest turns have 95 % intervals. ``repeat`` is the median difference between two measured rounds. Shares
    of what was measured."""

    name: str
    measured: float
    simulated: float
    error: float
    interval: tuple[float, float]
    near_error: float
    near_interval: tuple[float, float]
    repeat: float


NAMES = (
    "tok/s",
    *(f"{time} {share}" for time in ("TTFT", "TPOT", "E2E") for share in ("p50", "p99")),
    "in time",
)
"""Figures of a round; the last one is the share of requests that are in time."""


def _real(run: Run, limits: Floats) -> Figures:
    times = [[each.ttft, each.tpot, each.e2e] for each in run.records]
    return Figures(run.summary.output_tokens_per_second, np.array(times, dtype=np.float64).T, limits)


def _figures(rounds: Sequence[Figures], which: Sequence[int], chosen: Places | slice = slice(None)) -> Floats:
    """The figures in `NAMES` of some requests of some rounds: a row for each of these."""
    rows = []
    for number in which:
        one = rounds[number]
        times = one.times[:, chosen]
        shares = np.nanpercentile(times, [50.0, 99.0], axis=1).T
        late = (times > one.limits[:, None]).any(axis=0)
        rows.append([one.tokens_per_second, *shares.ravel(), 1.0 - late.mean()])
    return np.array(rows)


def _compare(real: Sequence[Figures], plain: Sequence[Figures], near: Sequence[Figures]) -> list[Compared]:
    """All figures of one load, measured and simulated ones the medians of the rounds."""
    everything = range(len(real))

    def errors(which: Sequence[int], chosen: Places | slice = slice(None)) -> Floats:
        seen = np.median(_figures(real, which, chosen), axis=0)
        return np.array(
            [np.median(_figures(each, which, chosen), axis=0) / seen - 1.0 for each in (plain, near)]
        )

    rng = np.random.default_rng(0)
    requests = real[0].times.shape[1]
    drawn = []
    for _ in range(RESAMPLES):
        starts = rng.integers(0, requests, -(-requests // STRETCH))
        chosen = (starts[:, None] + np.arange(STRETCH)).ravel()[:requests] % requests
        drawn.append(errors(rng.choice(len(real), len(real)).tolist(), chosen))
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    seen, simulated = _figures(real, everything), np.median(_figures(plain, everything), axis=0)
    pairs = [abs(seen[i] / seen[j] - 1.0) for i in everything for j in everything if i < j]
    repeat = np.median(pairs, axis=0) if pairs else np.full(len(NAMES), math.nan)
    measured, found = np.median(seen, axis=0), errors(everything)
    return [
        Compared(
            name, measured[i], simulated[i], found[0, i], (low[0, i], high[0, i]),
            found[1, i], (low[1, i], high[1, i]), repeat[i],
        )
        for i, name in enumerate(NAMES)
    ]  # fmt: skip


def _show(compared: Mapping[str, Sequence[Compared]]) -> None:
    """Prints the figures of each load as a table."""
    table = Table(title="errors of the simulation in percent, with 95 % intervals", title_justify="left")
    columns = (
        "load",
        "figure",
        "measured",
        "simulated",
        "error",
        "with the nearest turn",
        "two measured rounds",
    )
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < 2 else "right")
    for load, figures in compared.items():
        for each in figures:
            unit, factor = ("", 1.0) if each.name in (NAMES[0], NAMES[-1]) else (" ms", 1e3)
            values = [f"{factor * value:,.2f}{unit}" for value in (each.measured, each.simulated)]
            errors = [
                f"{100 * error:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
                for error, (low, high) in (
                    (each.error, each.interval),
                    (each.near_error, each.near_interval),
                )
            ]
            name = f"{100 * float(load):.0f} %" if each is figures[0] else ""
            table.add_row(
                name, each.name, *values, *errors, f"{100 * each.repeat:.1f}", end_section=each is figures[-1]
            )
    say(table)


if __name__ == "__main__":
    main()
