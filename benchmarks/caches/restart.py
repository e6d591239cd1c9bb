"""Cache warming after a restart: ``python -m benchmarks.caches restart --data FOLDER``.

A server records the history of ``--recorded`` greedy chat requests over ``--questions`` different prompts of
``prompts/*.jsonl``; the k-th most frequent one occurs 1/k as often as the first. It ends, and its response cache in
memory is lost. A second server receives ``--requests`` more requests of the same distribution, once cold and once after
warming from the history. Requests that are not in the history are computed in both cases.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.stage import Server, arguments, publish, read_prompts, say, server
from headrace.cli.bench.targets import make_server_target
from headrace.lab.bench.stats import percentile
from headrace.lab.workload.work import Message, Work

OUTPUT = 32
STEPS = "step_kind_seconds_total"


class Peak(NamedTuple):
    """The requests after a restart: share of hits, seconds to the first token, and seconds of all engine steps."""

    hit_rate: float
    ttft_mean_seconds: float
    ttft_p99_seconds: float
    step_seconds: float


def drawn(texts: Sequence[str], count: int, seed: int) -> list[Work]:
    """``count`` greedy chats drawn at random, the k-th text 1/k as often as the first."""
    weights = [1.0 / rank for rank in range(1, len(texts) + 1)]
    chosen = random.Random(seed).choices(texts, weights, k=count)
    return [Work(f"w{at}", (Message("user", text),), OUTPUT) for at, text in enumerate(chosen)]


def send(running: Server, work: Sequence[Work], concurrency: int) -> Peak:
    """Send the requests, ``concurrency`` at a time."""
    before = running.metrics(), _hits(running)
    records = make_server_target("server", running.url, "", concurrency=concurrency).run(work)
    after = running.metrics(), _hits(running)
    assert not any(each.error for each in records), next(each.error for each in records if each.error)
    steps = after[0].get(STEPS, 0.0) - before[0].get(STEPS, 0.0)
    ttfts = [each.ttft or 0.0 for each in records]
    return Peak((after[1] - before[1]) / len(work), statistics.mean(ttfts), percentile(ttfts, 99), steps)


def _hits(running: Server) -> float:
    """Responses that were not computed: those of the cache, and those of an equal request."""
    layers = [running.metrics(f'layer="{layer}"') for layer in ("exact", "coalesced")]
    return sum(each.get("response_cache_hits_total", 0.0) for each in layers)


def restart(args: Namespace, texts: Sequence[str], history: Path, number: int) -> dict[str, Peak]:
    """Measure the first requests after a restart, cold and warmed."""
    cache = ("--response-cache", "memory")
    remembering = ("--history-file", str(history), "--record-history")
    after = drawn(texts, args.requests, 2 * number + 1)
    with server(args, *cache, *remembering, "--warm-seconds-per-hour", "0") as running:
        send(running, drawn(texts, args.recorded, 2 * number), args.concurrency)
        time.sleep(2.0)  # the last notes are written within a second
    with server(args, *cache) as running:
        cold = send(running, after, args.concurrency)
    warming = ("--warm-before-ready", "600", "--warm-seconds-per-hour", "3600")
    with server(args, *cache, *remembering, *warming) as running:
        return {"cold": cold, "warmed": send(running, after, args.concurrency)}


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts/")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--recorded", type=int, default=3000)
    parser.add_argument("--questions", type=int, default=150)
    parser.add_argument("--concurrency", type=int, default=2)
    args = parser.parse_args()
    texts = read_prompts(args.data)
    random.Random(args.seed).shuffle(texts)
    with tempfile.TemporaryDirectory() as folder:
        restarts = [
            restart(args, texts[: args.questions], Path(folder) / f"history-{number}.db", number)
            for number in range(args.rounds)
        ]
    say(
        f"first {args.requests} requests after a restart, {args.questions} questions, medians of {args.rounds} rounds"
    )
    say("           hit rate   TTFT mean ms   TTFT p99 ms   steps s")
    results = {}
    for name in restarts[0]:
        found = Peak(*map(statistics.median, zip(*(each[name] for each in restarts), strict=True)))
        say(
            f"{name:10} {found.hit_rate:9.1%} {found.ttft_mean_seconds * 1e3:14.1f} "
            f"{found.ttft_p99_seconds * 1e3:13.1f} {found.step_seconds:9.2f}"
        )
        results[name] = found._asdict()
    publish("caches-restart", args, [], [], **results)
