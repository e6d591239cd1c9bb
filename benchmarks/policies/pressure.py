"""The cost of a KV cache that is too small: the same requests over pools of less and less memory, in virtual time.

All requests arrive at once and may produce longer outputs than they do, so running requests outgrow the pool and some
are preempted. There are three machines: one without a tier below the device, which recomputes lost tokens; one with
fast host memory, from which they are restored; one with slow host memory, where recomputing is faster and is chosen.
The engine is the real one; only its runner is simulated (`headrace.lab.simulate`).

A smaller pool holds fewer requests, and fewer rows per step produce fewer tokens per second with any scheduler. So each
rate is given as a share of an uncontended run with as many slots as requests ran on average, and of one with all slots.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from benchmarks.stage import plain_parser
from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.events import Event, Finished, Moved, MoveReason, Preempted, Stepped
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.lab.plan.roofline import Replica, device
from headrace.lab.simulate.runner import EOS_IDS
from headrace.wiring.simulation import Machine, make_replica, roofline_machine, shape_of

HOST_BYTES = 64 << 30
SLOW_BYTES_PER_SECOND = 1e8
"""Bandwidth of the third machine's host memory, as over a network."""

POOLS = (100, 75, 60, 50, 40)
"""Sizes of the pool, in % of what all requests that may run at once need at their average length."""

COLUMNS = (
    *(("pool", 6), ("machine", 10), ("of as many", 10), ("of all", 7), ("running", 8), ("preempted", 10)),
    *(("most", 5), ("lost", 9), ("computed", 9), ("swapped", 8), ("restored", 9), ("unfinished", 10)),
)
"""Columns: rate as a share of the two uncontended ones, mean running requests, preemptions in total and the maximum per
request, tokens lost by them and computed, blocks swapped out and restored, unfinished requests."""


class RunResult(NamedTuple):
    """The result of one run; rates in tokens per second."""

    rate: float
    preempted: int
    most: int
    lost_tokens: int
    computed_tokens: int
    swapped_out: int
    restored: int
    running: float
    unfinished: int


def requests(
    count: int, prompt: int, longest: int, seed: int
) -> tuple[list[Request], dict[str, tuple[int, ...]]]:
    """Requests of at most ``longest`` output tokens, and the real length of each: half of that on average."""
    rng = random.Random(seed)
    todo, answers = [], {}
    for i in range(count):
        tokens = tuple(rng.randrange(1000) for _ in range(rng.randint(prompt // 2, prompt * 3 // 2)))
        params = SamplingParams(max_tokens=longest)
        todo.append(Request(f"r{i}", tokens, params, eos_token_ids=EOS_IDS))
        answers[f"r{i}"] = tuple(
            rng.randrange(1000) for _ in range(rng.randint(longest // 8, longest * 7 // 8))
        )
    return todo, answers


def simulate(
    machine: Machine, num_blocks: int, host_bytes: int, slots: int, args: argparse.Namespace, seed: int
) -> RunResult:
    """Run all requests, ``slots`` at a time, until the last has finished."""
    todo, answers = requests(args.num_prompts, args.input_len, args.output_len, seed)
    plans = SchedulerOptions(max_num_seqs=slots, scheduling_policy=args.scheduling_policy)
    cache = CacheOptions(kv_offload_bytes=host_bytes)
    tokens = num_blocks * cache.block_size
    sized = replace(machine, kv_tokens=tokens, max_model_len=min(machine.max_model_len, tokens))
    engine, runner = make_replica(plans, cache, sized, answers)
    events: list[Event] = []
    now = 0.0
    for request in todo:
        engine.submit(request, now)
    while (due := engine.wake_at(now)) is not None:
        now = max(now, due)
        events += engine.step(now)
        now = max(now, runner.time)
    engine.check_consistency()
    return summarize(events, now, todo)


def summarize(events: list[Event], seconds: float, todo: list[Request]) -> RunResult:
    """The figures of a run from its events."""
    ends = [event for event in events if isinstance(event, Finished)]
    steps = [event for event in events if isinstance(event, Stepped)]
    times = Counter(event.request_id for event in events if isinstance(event, Preempted))
    return RunResult(
        sum(end.output_tokens for end in ends) / seconds,
        times.total(),
        max(times.values(), default=0),
        sum(event.lost_tokens for event in events if isinstance(event, Preempted)),
        sum(event.computed_tokens for event in steps),
        sum(e.blocks for e in events if isinstance(e, Moved) and e.reason is MoveReason.EVICTED),
        sum(e.blocks for e in events if isinstance(e, Moved) and e.reason is MoveReason.RESTORED),
        sum(event.running for event in steps) / len(steps),
        len(todo) - sum(end.reason is FinishReason.STOP for end in ends),
    )


def main() -> None:
    """Run, print a table."""
    parser = plain_parser(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape known by name, or a folder's")
    parser.add_argument("--device", default="H100-SXM", help="as in `headrace plan`")
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=2048, help="that requests may answer at most")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument(
        "--scheduling-policy", default="fcfs", choices=("fair", "fcfs"), help="fair foresees peaks"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cache, plans = CacheOptions(), SchedulerOptions(max_num_seqs=args.max_num_seqs)
    fast = roofline_machine(Replica(shape_of(args.model), device(args.device)), cache, plans)
    machines = {
        "recompute": (fast, 0),
        "swap": (fast, HOST_BYTES),
        "slow host": (replace(fast, host_bytes_per_second=SLOW_BYTES_PER_SECOND), HOST_BYTES),
    }
    slots, seeds = args.max_num_seqs, range(args.rounds)
    needed = slots * (args.input_len + args.output_len // 2) // cache.block_size

    def uncontended_rate(running: int, seed: int) -> float:
        return simulate(fast, 4 * needed, 0, running, args, seed).rate

    whole = [uncontended_rate(slots, seed) for seed in seeds]
    print(
        f"{fast.name}: {args.num_prompts} requests, {slots} at once; {median(whole):,.0f} tokens/s in ample memory"
    )
    print(" ".join(f"{name:>{width}}" for name, width in COLUMNS))
    for percent in POOLS:
        for name, (machine, host_bytes) in machines.items():
            results = [
                simulate(machine, needed * percent // 100, host_bytes, slots, args, seed) for seed in seeds
            ]
            rates = [one.rate for one in results]
            as_many = [
                uncontended_rate(round(one.running), seed) for one, seed in zip(results, seeds, strict=True)
            ]
            figures = (
                f"{percent} %",
                name,
                f"{_share(rates, as_many):.3f}",
                f"{_share(rates, whole):.3f}",
                f"{median(one.running for one in results):.1f}",
                median(one.preempted for one in results),
                max(one.most for one in results),
                median(one.lost_tokens for one in results),
                median(one.computed_tokens for one in results),
                median(one.swapped_out for one in results),
                median(one.restored for one in results),
                sum(one.unfinished for one in results),
            )
            line = zip(figures, COLUMNS, strict=True)
            print(" ".join(f"{figure:>{width}}" for figure, (_, width) in line), flush=True)


def _share(rates: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(rates, others, strict=True))
