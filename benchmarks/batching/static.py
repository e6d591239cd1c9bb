"""Continuous compared with static batching, for output lengths that vary.

Each static batcher first runs with several batch sizes, to find its best one. Then continuous batching and the two best
static batchers run in alternating rounds. KV waste is that of the continuous run. The bound of the workload is printed
in steps, and in seconds by the measured cost of a decode step per number of rows.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from benchmarks.stage import arguments, publish, say, target
from headrace.lab.bench.report import compare, measure
from headrace.lab.bench.static_batching import bound
from headrace.lab.bench.stats import Target, median
from headrace.lab.workload.dataset import Dataset
from headrace.lab.workload.work import Work

COST_TOKENS = 128
"""Length of the equal outputs with which the cost of a decode step is measured."""


def step_costs(engine: Target, max_rows: int, rounds: int) -> dict[int, float]:
    """Seconds of a decode step by its rows, 1 to ``max_rows`` by doubling: the median of ``rounds``."""
    costs = {}
    for rows in [2**n for n in range(max_rows.bit_length()) if 2**n <= max_rows]:
        work = [Work(f"cost-{i}", (5, 6, 7, 8 + i), COST_TOKENS, ignore_eos=True) for i in range(rows)]
        engine.run(work)
        costs[rows] = median([engine.run(work)[0].tpot or 0.0 for _ in range(rounds)])
    return costs


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--num-prompts", type=int, default=300)
    parser.add_argument("--dataset", default="high-variance", help="or high-variance-chats")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="rows of continuous batching")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--sweep-prompts", type=int, default=150, help="requests per batch size tried")
    return parser


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, write; the figures of the report."""
    dataset = Dataset(args.dataset, count=args.num_prompts, seed=args.seed)
    work = dataset.draw()

    tried: dict[str, dict[int, float]] = {
        "headrace-static,max_num_seqs": {},
        "transformers-static,batch_size": {},
    }
    for kind, speeds in tried.items():
        for size in args.batch_sizes:
            candidate = target(f"{kind}={size}", args)
            run = measure(candidate, work[: args.sweep_prompts])
            candidate.close()
            speeds[size] = run.summary.output_tokens_per_second
            say(f"{kind}={size}: {speeds[size]:.1f} output tok/s")
    best = {kind: max(speeds, key=lambda size: speeds[size]) for kind, speeds in tried.items()}

    targets = [
        target(f"static=headrace-static,max_num_seqs={best['headrace-static,max_num_seqs']}", args),
        target(f"transformers=transformers-static,batch_size={best['transformers-static,batch_size']}", args),
        target(f"continuous=headrace,max_num_seqs={args.max_num_seqs}", args),
    ]
    for each in targets:
        each.run(work[:4])
    result = compare(targets, work, args.rounds)
    static, padded, continuous = result.middle()
    lengths = [record.output_tokens for record in continuous.records]
    best_rows = best["headrace-static,max_num_seqs"]
    limits = bound(lengths, best_rows, refill=args.max_num_seqs)
    costs = step_costs(targets[2], args.max_num_seqs, args.rounds)
    timed = bound(
        lengths,
        best_rows,
        lambda rows: float(np.interp(rows, list(costs), list(costs.values()))),
        refill=args.max_num_seqs,
    )
    ratios = {
        f"{figure} against {run.target}": getattr(continuous.summary, figure) / getattr(run.summary, figure)
        for run in (static, padded)
        for figure in ("output_tokens_per_second",)
    }
    ratios |= {
        f"p99 TTFT against {run.target}": continuous.summary.ttft.p99 / run.summary.ttft.p99
        for run in (static, padded)
    }
    every = [run for runs in result.rounds for run in runs]
    results = {
        "best_batch_sizes": best,
        "tried": tried,
        "ratios": ratios,
        "bound": {**dataclasses.asdict(limits), "gain": limits.gain, "most": limits.most},
        "step_seconds": costs,
        "bound_at_step_seconds": {**dataclasses.asdict(timed), "gain": timed.gain, "most": timed.most},
    }
    publish("batching-static", args, every, [continuous, static, padded], **results)
    for name, ratio in ratios.items():
        say(f"{name}: {ratio:.2f}x")
    say(f"bound of the workload in steps: refilling {limits.gain:.2f}x, any scheduler {limits.most:.2f}x")
    say("a decode step: " + ", ".join(f"{rows} rows {1e3 * cost:.2f} ms" for rows, cost in costs.items()))
    say(
        f"decoding alone at these costs: refilled {timed.refilled:.2f} s, static {timed.static:.2f} s "
        f"({timed.gain:.2f}x), static that computes rows that are done on {timed.padded:.2f} s "
        f"({timed.padded / timed.refilled:.2f}x); measured with prompts and all: continuous "
        f"{continuous.summary.seconds:.2f} s, static {static.summary.seconds:.2f} s"
    )
    say(f"KV waste: {continuous.facts['kv_waste_percent']:.2f} %")
    for each in targets:
        each.close()
    return results


def main() -> None:
    """Measure with the options of the command line."""
    measured(parser().parse_args())
