"""A million requests of a production trace's shape through the simulator, on one core, twice for the same bytes.

The trace's calls are drawn with replacement; a fleet of H100s serves an 8-billion-parameter model to them in virtual
time. Without ``--trace`` lengths are log-normal around the means of Azure's conversations (1,155 and 211 tokens).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.stage import say
from headrace.config import CacheOptions, SchedulerOptions
from headrace.lab.bench import report
from headrace.lab.plan.roofline import H100, SHAPES, Replica
from headrace.lab.simulate.outcome import Outcome, outcome
from headrace.lab.simulate.runner import from_calls
from headrace.lab.workload.call import Call, Synthesis, resampled, speedup
from headrace.lab.workload.distributions import gamma_process
from headrace.lab.workload.traces import read_trace
from headrace.wiring.simulation import make_fleet, roofline_machine

PROMPT_MEAN, ANSWER_MEAN, SIGMA = 1155.0, 211.0, 1.0


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second and replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--scheduling-policy", default="fair")
    parser.add_argument("--repeat", type=int, default=1, help="2: run twice and compare the reports")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("bench-results/simulate_million.json"))
    args = parser.parse_args()
    digests = set()
    for _ in range(args.repeat):
        began, cpu = time.perf_counter(), time.process_time()
        results = simulate(args)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        summary = results.summary
        results_twice = {
            "summary": dataclasses.asdict(summary),
            "facts": results.facts,
            "timeline": results.timeline,
        }
        digests.add(hashlib.sha256(json.dumps(report.plain(results_twice)).encode()).hexdigest())
        per_token = 1e6 * cpu / max(1, summary.output_tokens)
        say(
            f"{summary.requests:,} requests, {summary.prompt_tokens:,} + {summary.output_tokens:,} tokens,"
            f" {results.facts['steps']:,} steps of {results.facts['batch_rows_mean']:.0f} rows;"
            f" {summary.seconds:,.0f} virtual seconds"
        )
        say(
            f"{seconds / 60:.1f} minutes ({cpu / 60:.1f} of processor time), {per_token:.2f} µs a token,"
            f" {1e6 / summary.requests * seconds / 60:.1f} minutes per million requests,"
            f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
        )
    if args.repeat > 1:
        say("equal to the last bit" if len(digests) == 1 else "DIFFERENT RUNS")
    settings = {name: str(value) for name, value in vars(args).items()}
    results_json = {
        "minutes": seconds / 60,
        "digest": min(digests),
        "equal": len(digests) == 1,
        "facts": dict(results.facts),
    }
    report.write(args.output, report.document([report.Run("million", (), summary)], settings, results_json))
    say(f"written: {args.output}")


def simulate(args: argparse.Namespace) -> Outcome:
    """One run."""
    plans = SchedulerOptions(max_num_seqs=args.max_num_seqs, scheduling_policy=args.scheduling_policy)
    cache = CacheOptions()
    machine = roofline_machine(Replica(SHAPES["llama-3.1-8b"], H100), cache, plans)
    fleet = make_fleet(plans, cache, machine, replicas=args.replicas)
    fleet.run(from_calls(calls(args), Synthesis(seed=args.seed)))
    return outcome(fleet.tally, {"ttft": 1.0, "tpot": 0.05})


def calls(args: argparse.Namespace) -> Iterator[Call]:
    """The calls, at ``--rate`` per replica."""
    rate = args.rate * args.replicas
    if args.trace is None:
        yield from _drawn(args.requests, rate, args.seed)
        return
    trace = list(read_trace(args.trace))
    pace = (len(trace) - 1) / trace[-1].arrival
    yield from speedup(resampled(trace, args.requests, args.seed), rate / pace)


def _drawn(count: int, rate: float, seed: int) -> Iterator[Call]:
    rng = random.Random(seed)
    times = gamma_process(rate, rng, burstiness=0.5)

    def length(mean: float, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))))

    for _ in range(count):
        yield Call(next(times), length(PROMPT_MEAN, 14_000), length(ANSWER_MEAN, 2_000))


if __name__ == "__main__":
    main()
