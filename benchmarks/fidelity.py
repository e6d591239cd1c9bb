"""How well the simulator predicts a real server: one trace at three loads, measured over HTTP and simulated.

The machine is calibrated on made-up work (`headrace bench calibrate`), never on the trace that is predicted. A closed
loop finds what the server can do; the trace is then replayed at shares of that. Without ``--model`` the server runs
SmolLM2-135M's shape with random weights; without ``--trace`` a bursty population of log-normal lengths is replayed.

Each load is measured in several rounds, the loads in turn, and each figure is the median of the rounds. A shared
machine is not equally fast in all minutes, so a pulse of fixed work, made up too, is timed before and after each round:
a round is simulated at the pace that its pulses had beside the simulated pulse. How far the real rounds lie from each
other, and what others took of the machine meanwhile, is shown beside the errors.

``--replicas 2`` does the same with several servers that get the requests in turn. Set ``OMP_NUM_THREADS`` so that they
do not share cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.table import Table

from benchmarks.peers.quiet import FOREIGN, Watched
from benchmarks.stage import Server, arguments, publish, say, server
from headrace.build.simulation import calibrated_machine, make_fleet
from headrace.cli.bench.calibrate import EACH_TOKEN, describe, measure
from headrace.cli.bench.targets import make_server_target
from headrace.compute.model.hub import resolve_folder
from headrace.config import Options, options
from headrace.lab.bench.measure import measure as run_target
from headrace.lab.bench.record import Record, Target
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Summary, median
from headrace.lab.calibration.values import Calibration
from headrace.lab.simulate.outcome import outcome
from headrace.lab.simulate.requests import from_work
from headrace.lab.workload import Work
from headrace.lab.workload.call import Call
from headrace.lab.workload.population import calls as population_calls
from headrace.lab.workload.population import parse
from headrace.lab.workload.synthesis import Synthesis, replayed
from headrace.lab.workload.tokens import VOCABULARY
from headrace.lab.workload.traces import read_trace

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOADS = (0.3, 0.6, 0.9)
BEATS = 5
"""Of a pulse at a time; the median counts."""


def main() -> None:
    """Calibrate, measure, simulate, print, write."""
    parser = arguments(__doc__ or "", model="smollm2", rounds=5)
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=160, help="of the trace, in each round")
    parser.add_argument(
        "--scale", type=float, default=0.15, help="of the trace's lengths, for small machines"
    )
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args()
    with _model(args) as model, ExitStack() as stack:
        args.model = model
        given = options(
            {
                "model": model,
                "device": args.device,
                "load_format": "dummy" if model != "builtin" else "auto",
                "max_num_seqs": args.max_num_seqs,
                "max_model_len": args.max_model_len,
            }
        )
        flags = ["--max-num-seqs", str(args.max_num_seqs), "--max-model-len", str(args.max_model_len)]
        flags += ["--load-format", given.model.load_format]
        running = [stack.enter_context(server(args, *flags)) for _ in range(args.replicas)]
        calibration = measure(given, running[0].url)
        say(describe(calibration))
        simulate = partial(_simulate, given, calibration, args.replicas)
        pulse = Pulse(_target("pulse", running), args.replicas * args.max_num_seqs, simulate)
        watched = Watched(_target("server", running), [each.pid for each in running])
        work = _work(args)
        closed = _target("closed", running, args.max_num_seqs)
        most = run_target(closed, _paced(work, math.inf)).summary.requests_per_second
        say(f"capacity in a closed loop: {most:.2f} requests per second")
        paced = {load: _paced(work, load * most) for load in LOADS}
        rounds: dict[float, list[Round]] = {load: [] for load in LOADS}
        pulse.beat()
        for _ in range(args.rounds):
            for load in LOADS:
                run = run_target(watched, paced[load])
                rounds[load].append(Round(run, pulse.pace()))
    simulated = {
        load: [
            _simulate(given, calibration.at(each.pace), args.replicas, paced[load]) for each in rounds[load]
        ]
        for load in LOADS
    }
    compared = {f"{load:g}": _compare(rounds[load], simulated[load]) for load in LOADS}
    _show(compared)
    say(f"pulses beside simulated ones: {_told(rounds, lambda each: f'{each.pace:.2f}')}")
    say(f"{FOREIGN}: {_told(rounds, lambda each: each.run.facts[FOREIGN])}")
    told: dict[str, Any] = {"calibration": dataclasses.asdict(calibration), "capacity": most}
    told["figures"] = {load: [each._asdict() for each in figures] for load, figures in compared.items()}
    told["paces"] = {f"{load:g}": [each.pace for each in rounds[load]] for load in LOADS}
    publish("fidelity", args, [each.run for load in LOADS for each in rounds[load]], [], **told)


@contextmanager
def _model(args: argparse.Namespace) -> Iterator[str]:
    """The model to serve: a folder with SmolLM2's shape and the built-in tokenizer, unless another was named."""
    if args.model != "smollm2":
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(resolve_folder("builtin") / name, folder)
        (Path(folder) / "config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
        yield folder


def _work(args: argparse.Namespace) -> list[Work]:
    """The trace's first requests with scaled lengths, all answers as long as theirs."""
    if args.trace is None:
        tenants = [parse("rate=1,arrivals=bursty:0.5,prompt=lognormal:800:0.9,answer=lognormal:150:0.7")]
        calls: Iterator[Call] = population_calls(tenants, args.requests, args.seed + 1)
    else:
        calls = islice(read_trace(args.trace), args.requests)
    limit = args.max_model_len // 2 - 1

    def scaled(tokens: int) -> int:
        return max(1, min(limit, round(args.scale * tokens)))

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


class Turns:
    """Several servers as one target: they get the requests in turn."""

    def __init__(self, name: str, targets: Sequence[Target]) -> None:
        self.name = name
        self.completed = 0
        self._targets = targets

    def run(self, work: Sequence[Work]) -> list[Record]:
        count = len(self._targets)
        with ThreadPoolExecutor(count) as pool:
            runs = [pool.submit(each.run, work[i::count]) for i, each in enumerate(self._targets)]
        shares = [run.result() for run in runs]
        self.completed = len(work)
        return [shares[i % count][i // count] for i in range(len(work))]

    def facts(self) -> dict[str, Any]:
        return {"replicas": len(self._targets)}

    def close(self) -> None:
        """Nothing is held between runs."""


def _target(name: str, running: Sequence[Server], concurrency: int | None = None) -> Target:
    """The servers; a run finds nothing in their prefix caches, as a simulated one does."""

    def forget(url: str) -> None:
        httpx.post(f"{url}/reset_prefix_cache", timeout=30.0, trust_env=False).raise_for_status()

    targets = [
        make_server_target(name, each.url, "", "", EACH_TOKEN, concurrency, partial(forget, each.url))
        for each in running
    ]
    return targets[0] if len(targets) == 1 else Turns(name, targets)


def _paced(work: Sequence[Work], rate: float) -> list[Work]:
    """The same arrivals stretched to a mean of ``rate`` per second; infinite: all at once."""
    span = max(each.arrival for each in work) or 1.0
    stretch = 0.0 if rate == math.inf else len(work) / rate / span
    return [dataclasses.replace(each, arrival=each.arrival * stretch) for each in work]


def _simulate(given: Options, calibration: Calibration, replicas: int, work: Sequence[Work]) -> Summary:
    machine = calibrated_machine(calibration, given.cache, given.model.max_model_len)
    fleet = make_fleet(given.scheduler, given.cache, machine, replicas=replicas, routing="round-robin")
    fleet.warm_up(from_work(_paced(work, math.inf)))  # the server has seen such work too
    fleet.run(from_work(work, fleet.now))
    return outcome(fleet.tally, {}).summary


class Pulse:
    """Fixed work, half prompts and half answers, by which the machine's pace is told."""

    def __init__(self, target: Target, streams: int, simulate: Callable[[Sequence[Work]], Summary]) -> None:
        rng = random.Random(3)
        self._work = [
            Work(f"pulse{i}", tuple(rng.choices(VOCABULARY, k=128)), 32, ignore_eos=True)
            for i in range(streams)
        ]
        self._target = target
        self._foretold = simulate(self._work).seconds
        self._last = self.beat()

    def beat(self) -> float:
        """Seconds that the work takes now."""
        self._last = median([run_target(self._target, self._work).summary.seconds for _ in range(BEATS)])
        return self._last

    def pace(self) -> float:
        """How many times as long as foretold the work took around what ran since the last beat."""
        return (self._last + self.beat()) / 2 / self._foretold


class Round(NamedTuple):
    """One round of one load, and the pace of the machine meanwhile."""

    run: Run
    pace: float


def _told(rounds: Mapping[float, Sequence[Round]], what: Callable[[Round], object]) -> str:
    return "; ".join(", ".join(str(what(each)) for each in rounds[load]) for load in LOADS)


class Compared(NamedTuple):
    """One figure, measured and simulated. ``error`` and ``spread`` are shares of what was measured; the spread is half
    of what lies between the lowest and the highest round."""

    name: str
    measured: float
    simulated: float
    error: float
    spread: float


def _compare(rounds: Sequence[Round], simulated: Sequence[Summary]) -> list[Compared]:
    """All figures of one load, measured and simulated ones the medians of the rounds."""
    real = [_figures(each.run.summary) for each in rounds]
    foretold = [_figures(each) for each in simulated]
    compared = []
    for name in real[0]:
        seen = [figures[name] for figures in real]
        measured, predicted = median(seen), median([figures[name] for figures in foretold])
        spread = (max(seen) - min(seen)) / 2 / measured
        compared.append(Compared(name, measured, predicted, predicted / measured - 1.0, spread))
    return compared


def _figures(summary: Summary) -> dict[str, float]:
    return {
        "tok/s": summary.output_tokens_per_second,
        "TTFT p50": summary.ttft.p50,
        "TTFT p99": summary.ttft.p99,
        "TPOT p50": summary.tpot.p50,
        "TPOT p99": summary.tpot.p99,
    }


def _show(compared: Mapping[str, Sequence[Compared]]) -> None:
    """Prints real, simulated, error and the rounds' spread per load."""
    table = Table(
        title="real / simulated (error, rounds)", title_justify="left", header_style="bold", show_lines=True
    )
    table.add_column("load")
    for each in next(iter(compared.values())):
        table.add_column(each.name, justify="right")
    for load, figures in compared.items():
        cells = []
        for name, measured, predicted, error, spread in figures:
            unit = (lambda v: f"{v:.1f}") if name == "tok/s" else (lambda v: f"{1e3 * v:.1f} ms")
            cells.append(
                f"{unit(measured)} / {unit(predicted)} ({100 * error:+.1f} %, ±{100 * spread:.1f} %)"
            )
        table.add_row(f"{100 * float(load):.0f} %", *cells)
    say(table)


if __name__ == "__main__":
    main()
