"""Cache warming after a restart: ``python -m benchmarks.caches restart --data FOLDER``.

A server records the history of ``--recorded`` greedy chat requests over ``--questions`` different prompts of
``prompts/*.jsonl``; the k-th most frequent one occurs 1/k as often as the first. It ends, and its response cache in
memory is lost. A second server receives ``--requests`` more requests of the same distribution, once cold and once after
warming from the history. Requests that are not in the history are computed in both cases.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.stage import Server, arguments, publish, read_prompts, say, server
from headrace.lab.bench.stats import percentile

OUTPUT = 32
NEVER = ("--warm-seconds-per-hour", "0")


class StreamedAnswer(NamedTuple):
    """One streamed answer: seconds to its first chunk, and the response header of the caches."""

    ttft: float
    note: str


class Peak(NamedTuple):
    """The requests after a restart: their answers, and the seconds of all engine steps meanwhile."""

    answers: list[StreamedAnswer]
    step_seconds: float


def drawn(texts: list[str], count: int, seed: int) -> list[str]:
    """``count`` texts drawn at random, the k-th 1/k as often as the first."""
    weights = [1.0 / rank for rank in range(1, len(texts) + 1)]
    return random.Random(seed).choices(texts, weights, k=count)


async def ask(client: httpx.AsyncClient, text: str) -> StreamedAnswer:
    """Stream one greedy answer."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": OUTPUT}
    begin, ttft = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not ttft and line.startswith("data:"):
                ttft = time.perf_counter() - begin
    return StreamedAnswer(ttft, response.headers.get("X-Headrace-Cache", ""))


async def closed(running: Server, texts: list[str], concurrency: int) -> list[StreamedAnswer]:
    """Send all texts, ``concurrency`` at a time."""
    line: Iterator[str] = iter(texts)
    answers: list[StreamedAnswer] = []

    async def work(client: httpx.AsyncClient) -> None:
        answers.extend([await ask(client, text) for text in line])

    async with httpx.AsyncClient(base_url=running.url, timeout=120.0, trust_env=False) as client:
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
    return answers


def peak(running: Server, texts: list[str], concurrency: int) -> Peak:
    """Send the requests, and count the steps."""
    before = running.metrics().get("step_kind_seconds_total", 0.0)
    answers = asyncio.run(closed(running, texts, concurrency))
    return Peak(answers, running.metrics().get("step_kind_seconds_total", 0.0) - before)


def restart(args: Namespace, texts: list[str], folder: Path, round_: int) -> dict[str, Peak]:
    """Measure the first requests after a restart, cold and warmed."""
    asked = texts[: args.questions]
    history = folder / f"history-{round_}.db"
    remembering = ("--history-file", str(history), "--record-history")
    flags = ("--response-cache", "memory")
    before = drawn(asked, args.recorded, 2 * round_)
    after = drawn(asked, args.requests, 2 * round_ + 1)
    with server(args, *flags, *remembering, *NEVER) as running:
        asyncio.run(closed(running, before, args.concurrency))
        time.sleep(2.0)  # the last notes are written within a second
    found = {}
    with server(args, *flags) as running:
        found["cold"] = peak(running, after, args.concurrency)
    with server(
        args, *flags, *remembering, "--warm-before-ready", "600", "--warm-seconds-per-hour", "3600"
    ) as running:
        found["warmed"] = peak(running, after, args.concurrency)
    return found


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
        restarts = [restart(args, texts, Path(folder), round_) for round_ in range(args.rounds)]
    say(
        f"first {args.requests} requests after a restart, {args.questions} questions, medians of {args.rounds} rounds"
    )
    say("           hit rate   TTFT mean ms   TTFT p99 ms   steps s")
    results: dict[str, dict[str, float]] = {}
    for name in ("cold", "warmed"):
        runs = [found[name].answers for found in restarts]
        steps = statistics.median(found[name].step_seconds for found in restarts)
        hits = statistics.median(
            sum(each.note.startswith(("hit", "coalesced")) for each in run) / len(run) for run in runs
        )
        mean = statistics.median(statistics.mean(each.ttft for each in run) for run in runs)
        p99 = statistics.median(percentile([each.ttft for each in run], 99) for run in runs)
        say(f"{name:10} {hits:9.1%} {mean * 1e3:14.1f} {p99 * 1e3:13.1f} {steps:9.2f}")
        results[name] = {"hit_rate": hits, "ttft_mean_seconds": mean, "ttft_p99_seconds": p99}
        results[name]["step_seconds"] = steps
    publish("caches-restart", args, [], [], **results)
