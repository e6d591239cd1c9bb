"""Policies against first come, first served, in the simulator on recorded arrivals.

    python -m benchmarks.policies scheduling --data DIR goodput|tenants|prefixes|classes

``--data`` is a folder with traces (Azure LLM 2023 conversations, Mooncake conversations). The engine is the one that
serves; only its runner is simulated, as a model on a device by roofline.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.stage import plain_parser
from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.request import Slo
from headrace.lab.bench.stats import Spread
from headrace.lab.plan.roofline import SHAPES, Replica, device
from headrace.lab.simulate.runner import SimulatedRequest, from_calls
from headrace.lab.simulate.tally import Outcome, Tally, outcome
from headrace.lab.workload.population import DAY, diurnal
from headrace.lab.workload.traces import read_trace
from headrace.lab.workload.work import Call, Synthesis, speedup
from headrace.wiring.simulation import make_fleet, roofline_machine

AZURE = "azure_llm_2023_conv_first_half.csv"
MOONCAKE = "mooncake_conversation_first_half.jsonl"
SLO = {"ttft": 1.0, "tpot": 0.1}
MAX_MODEL_LEN = 16384
SPELL = 4096.0
"""Seconds, about an hour: a multiple of a day's buckets of time."""


def live(
    args: argparse.Namespace,
    calls: Iterable[Call],
    edit: Callable[[SimulatedRequest], SimulatedRequest] = lambda asked: asked,
    *,
    num_blocks: int | None = None,
    host_blocks: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    max_tokens: int | None = 2048,
    block_size: int = 16,
    slo: dict[str, float] = SLO,
    **plans_given: Any,
) -> tuple[Outcome, Tally]:
    """One replica living through the calls under the given options."""
    plans = SchedulerOptions(max_num_seqs=args.max_num_seqs, **plans_given)
    replica = Replica(SHAPES[args.shape], device(args.device))
    cache = CacheOptions(
        block_size=block_size, kv_offload_bytes=host_blocks * block_size * replica.kv_bytes_per_token
    )
    machine = roofline_machine(replica, cache, plans, max_model_len)
    if num_blocks is not None:
        machine = replace(machine, kv_tokens=num_blocks * block_size)
    fleet = make_fleet(plans, cache, machine)
    fleet.run(map(edit, from_calls(calls, Synthesis(), max_tokens)))
    return outcome(fleet.tally, slo), fleet.tally


def _trace(args: argparse.Namespace, name: str, limit: int | None = None) -> list[Call]:
    return list(itertools.islice(read_trace(args.data / name), limit))


def _wishing(asked: SimulatedRequest) -> SimulatedRequest:
    return asked._replace(request=replace(asked.request, slo=Slo(SLO["ttft"], SLO["tpot"])))


def goodput(args: argparse.Namespace) -> None:
    """Requests inside TTFT 1 s and TPOT 100 ms per second, by load."""
    calls = _trace(args, AZURE, args.limit)
    print(f"{'load':>5} {'offered/s':>9} | {'fcfs':>8} {'fair':>8} {'ratio':>6} | p99 TTFT fcfs, fair")
    for factor in args.loads:
        told = {}
        for policy in args.policies:
            told[policy], _ = live(args, speedup(calls, factor), _wishing, scheduling_policy=policy)
        good = {name: each.summary.goodput or 0.0 for name, each in told.items()}
        p99 = [each.summary.ttft.p99 for each in told.values()]
        offered = factor * len(calls) / calls[-1].arrival
        ratio = good["fair"] / good["fcfs"] if good["fcfs"] else float("inf")
        print(
            f"{factor:5.2f} {offered:9.2f} | {good['fcfs']:8.3f} {good['fair']:8.3f} {ratio:6.2f} |"
            f" {p99[0]:7.2f} {p99[1]:7.2f}"
            f"  failures {dict(told['fair'].failures)} {told['fair'].facts['preemptions']}",
            flush=True,
        )


def _merged(*streams: Iterable[Call]) -> list[Call]:
    return sorted(itertools.chain(*streams), key=lambda call: call.arrival)


def _spread(outcome: Outcome, tenant: str) -> Spread:
    (part,) = [each for each in outcome.tenants if each.name == tenant]
    return part.ttft


def tenants(args: argparse.Namespace) -> None:
    """Two tenants share a replica that bears ``--loads`` times the trace; the quiet one asks for half of its share."""
    calls = _trace(args, AZURE, args.limit)
    quiet = [call._replace(tenant="quiet") for call in speedup(calls, args.loads[0] / 4)]
    until = quiet[-1].arrival
    print(
        f"{'policy':>6} | quiet tenant's TTFT p50, p99: alone | beside its like | beside 10 times a share | p99 ratio"
    )
    for policy in args.policies:
        told = [
            _spread(live(args, _merged(quiet, beside), scheduling_policy=policy)[0], "quiet")
            for beside in ((), _evenly(calls, len(calls), until), _evenly(calls, 20 * len(calls), until))
        ]
        pairs = " | ".join(f"{each.p50:7.3f} {each.p99:7.3f}" for each in told)
        print(f"{policy:>6} | {pairs} | {told[2].p99 / told[1].p99:.2f}", flush=True)
    heavy = [call._replace(tenant="quiet") for call in speedup(calls, 2 * args.loads[0])]
    flood = list(_evenly(calls, 5 * len(calls), heavy[-1].arrival))
    for policy in args.policies:
        facts = live(args, _merged(heavy, flood), scheduling_policy=policy)[0].facts
        print(f"{policy:>6} | Jain index while both have more than they get: {facts['jain_backlogged']:.3f}")


def _evenly(calls: list[Call], count: int, until: float) -> Iterator[Call]:
    """``count`` calls of another tenant, drawn from the same ones, evenly until the given time."""
    rng = random.Random(0)
    for i in range(count):
        yield rng.choice(calls)._replace(tenant="flood", arrival=i * until / count)


def prefixes(args: argparse.Namespace) -> None:
    """Prefix hits with a pool of a quarter of the unique blocks, against a cache without limit.

    In the last row the host keeps as many again of what the pool evicts.
    """
    calls = _trace(args, MOONCAKE, args.limit)
    block = 512
    unique = {span for call in calls for span in call.content}
    print(f"{len(calls)} requests, {len(unique)} unique blocks of {block} tokens")
    longest = max(call.prompt_tokens + call.output_tokens for call in calls) + block
    for load in args.loads:
        quarter = len(unique) // 4
        cases: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
            ("unlimited, fcfs", 4 * len(unique), 0, {"scheduling_policy": "fcfs"}),
            ("quarter, fcfs", quarter, 0, {"scheduling_policy": "fcfs"}),
            ("quarter, fair arrival", quarter, 0, {"queue_order": "arrival"}),
            ("quarter, fair prefix", quarter, 0, {"queue_order": "prefix"}),
            ("and a quarter in the host", quarter, quarter, {"queue_order": "prefix"}),
        )
        for name, blocks, host, given in cases:
            told, _ = live(
                args,
                speedup(calls, load),
                num_blocks=blocks,
                host_blocks=host,
                max_model_len=longest,
                block_size=block,
                **given,
            )
            print(
                f"load {load:4.2f} {name:>25}: hits {told.facts['cache_hit_percent']:5.2f} % of prompt tokens,"
                f" TTFT p50 {told.summary.ttft.p50:7.2f} p99 {told.summary.ttft.p99:7.2f}"
                f" most {told.summary.ttft.most:7.2f}",
                flush=True,
            )


def classes(args: argparse.Namespace) -> None:
    """24 hours with a crest beyond capacity: no class starves, and the better one hardly notices.

    Lengths are those of the trace, the mean rate is ``--loads`` times its own. A slow device makes few steps of a day:
    ``--device cpu --loads 0.005``.
    """
    calls = _trace(args, AZURE, args.limit)
    rate = args.loads[0] * len(calls) / calls[-1].arrival
    names = ("priority", "default", "flex")
    for policy in args.policies:
        rng = random.Random(1)
        times = itertools.takewhile(lambda time: time < DAY, diurnal(rate, rng))
        day = [
            rng.choice(calls)._replace(arrival=time, tenant=name, service_class=name)
            for time in times
            for name in (rng.choice(names),)
        ]
        told, tally = live(args, day, scheduling_policy=policy)
        for part in told.classes:
            print(
                f"{policy:>5} {part.name:>9}: {part.requests} requests, {part.failed} failed,"
                f" TTFT p50 {part.ttft.p50:.2f} p99 {part.ttft.p99:.2f} most {part.ttft.most:.2f},"
                f" least share of an hour in which it waited {_least_share(tally, part.name):.3f}",
                flush=True,
            )


def _least_share(tally: Tally, name: str) -> float:
    """The least of what was served in an hour that a class got, where one of it at least waited all the time."""
    served = {each: tally.service.coarse(each, SPELL) for each in tally.service.columns}
    waiting = tally.waiting.coarse(name, SPELL)
    shares = [
        served[name][place] / total
        for place, waited in enumerate(waiting)
        if waited >= SPELL and (total := sum(column[place] for column in served.values()))
    ]
    return min(shares, default=1.0)


COMMANDS = {"goodput": goodput, "tenants": tenants, "prefixes": prefixes, "classes": classes}


def main() -> None:
    """Run one of the comparisons."""
    parser = plain_parser(__doc__)
    parser.add_argument("what", choices=sorted(COMMANDS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="H100-SXM")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--policies", nargs="+", default=["fcfs", "fair"])
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--loads", type=float, nargs="+", default=[1, 2, 3, 4, 5, 6])
    args = parser.parse_args()
    COMMANDS[args.what](args)
