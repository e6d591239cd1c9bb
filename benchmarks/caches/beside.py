"""Latency of other requests during cache warming: ``python -m benchmarks.caches beside --data FOLDER``.

One server receives the same requests at the same times (Poisson, ``--rate`` per second) in blocks of ``--block``
seconds, alternately with a warmer that always has work and considers the server idle, and without one. The order
alternates from pair to pair. No cache holds the requests. The load generator's client is used because it takes little
CPU time: what a client computes on the server's cores is also slower during warming. Each figure pools all blocks of a
kind. The 95 % interval of a ratio is from a bootstrap over pairs of blocks.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.caches.restart import StreamedAnswer, body, read_texts
from benchmarks.stage import Server, arguments, publish, say, server
from headrace.lab.bench.client import Connections
from headrace.lab.bench.stats import percentile

ALWAYS = ("--response-cache", "memory", "--warm-below-rate", "1000000", "--warm-seconds-per-hour", "3600")
JOB_TOKENS = 256
"""Length of a warmed answer: long, so that few prompts are rendered while other requests are timed."""

DRAWS = 2000


class ScheduledRequest(NamedTuple):
    """A request of a block, and its arrival in seconds from the beginning of the block."""

    at: float
    text: str


class Pair(NamedTuple):
    """Two blocks of the same requests."""

    alone: list[StreamedAnswer]
    beside: list[StreamedAnswer]


def make_block(texts: Sequence[str], rate: float, seconds: float, seed: int) -> list[ScheduledRequest]:
    """A block's requests, the same for the same seed."""
    rng = random.Random(seed)
    block, at = [], rng.expovariate(rate)
    while at < seconds:
        block.append(ScheduledRequest(at, rng.choice(texts)))
        at += rng.expovariate(rate)
    return block


async def ask(connections: Connections, raw: bytes) -> StreamedAnswer:
    """Stream one answer."""
    begin, first = time.perf_counter(), list[float]()

    def told(status: int, piece: bytes) -> None:
        if not first:
            first.append(time.perf_counter())

    status = await connections.post("/v1/chat/completions", {}, raw, told)
    if status != 200:
        raise RuntimeError(f"HTTP {status}")
    return StreamedAnswer(first[0] - begin, time.perf_counter() - begin, "")


async def send_block(
    connections: Connections, block: Sequence[ScheduledRequest], seconds: float, salt: str
) -> list[StreamedAnswer]:
    """Ask when it is due, however long answers take; ``salt`` parts this block's prompts from those of others."""
    more = {"stream": True, "cache_salt": salt, "response_cache": {"no_store": True}}
    bodies = [json.dumps(body(due.text) | more).encode() for due in block]
    begin, tasks = time.perf_counter(), []
    for due, raw in zip(block, bodies, strict=True):
        await asyncio.sleep(max(0.0, begin + due.at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(connections, raw)))
    answers = list(await asyncio.gather(*tasks))
    await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
    return answers


class Warmer:
    """The warmer of the server, controlled over its API."""

    def __init__(self, client: httpx.AsyncClient, texts: Sequence[str]) -> None:
        self._client = client
        self._texts = texts
        self._given = 0

    async def give(self, jobs: int) -> None:
        """Give it ``jobs`` new questions."""
        bodies = []
        for number in range(self._given, self._given + jobs):
            text = f"{number}: {self._texts[number % len(self._texts)]}"
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True}
            bodies.append({"url": "/v1/chat/completions", "body": body | {"max_tokens": JOB_TOKENS}})
        self._given += jobs
        (await self._client.post("/v1/cache/warm", json={"requests": bodies})).raise_for_status()

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self._client.get("/v1/cache/warm")).json()
        return state

    async def rest(self) -> None:
        """Wait until all are done."""
        while (state := await self.state())["waiting"] or state["running"]:
            await asyncio.sleep(0.2)


async def measure(running: Server, args: Namespace, texts: Sequence[str]) -> tuple[list[Pair], int, int]:
    """All pairs; how many answers the warmer computed beside them; and in how many blocks it ran out of work."""
    pairs, computed, idle = [], 0, 0
    half = len(texts) // 2
    ours, its = texts[:half], texts[half:]
    connections = Connections(running.url)
    async with httpx.AsyncClient(base_url=running.url, timeout=120.0, trust_env=False) as client:
        warmer = Warmer(client, its)
        jobs = 4 * args.batch
        for number in range(-1, args.pairs):  # the first pair warms up
            block = make_block(ours, args.rate, args.block, args.seed + number)
            answers: dict[bool, list[StreamedAnswer]] = {}
            for warming in (False, True) if number % 2 else (True, False):
                done = (await warmer.state())["computed"]
                if warming:
                    await warmer.give(jobs)
                    await asyncio.sleep(0.3)
                answers[warming] = await send_block(connections, block, args.block, f"{number} {warming}")
                state = await warmer.state()
                if warming and number >= 0:
                    computed += state["computed"] - done
                if warming and not (state["waiting"] or state["running"]):
                    idle += number >= 0
                    jobs *= 2
                await warmer.rest()
            if number >= 0:
                pairs.append(Pair(answers[False], answers[True]))
    connections.close()
    return pairs, computed, idle


def interval(
    pairs: Sequence[Pair], figure: Callable[[list[StreamedAnswer]], float], seed: int
) -> tuple[float, float]:
    """The 95 % bootstrap interval of a figure's ratio, with the warmer to without."""
    rng = random.Random(seed)
    ratios = []
    for _ in range(DRAWS):
        drawn = rng.choices(pairs, k=len(pairs))
        ratios.append(
            figure([each for pair in drawn for each in pair.beside])
            / figure([each for pair in drawn for each in pair.alone])
        )
    ratios.sort()
    return ratios[round(0.025 * DRAWS)], ratios[round(0.975 * DRAWS) - 1]


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts/")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--block", type=float, default=4.0, help="seconds")
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    texts = read_texts(args.data, args.seed)
    with server(args, *ALWAYS, "--warm-batch", str(args.batch)) as running:
        pairs, computed, idle = asyncio.run(measure(running, args, texts))
    alone = [each for pair in pairs for each in pair.alone]
    beside = [each for pair in pairs for each in pair.beside]
    say(
        f"{len(pairs)} pairs of blocks of {args.block:g} s, {len(alone)} requests of each kind at {args.rate:g}/s; "
        f"{computed} answers computed ahead beside them, {idle} blocks ended without work"
    )
    say("               alone ms  beside ms    ratio      95 %")
    figures: dict[str, Any] = {"requests": len(alone), "computed_ahead": computed, "idle_blocks": idle}
    for name in ("ttft", "seconds"):
        for percent in (50, 90, 99):

            def figure(answers: list[StreamedAnswer], name: str = name, percent: int = percent) -> float:
                return percentile([getattr(each, name) for each in answers], percent)

            low, high = interval(pairs, figure, args.seed)
            without, having = figure(alone), figure(beside)
            say(
                f"{name:8} p{percent:<4} {without * 1e3:9.2f} {having * 1e3:10.2f} {having / without:8.3f}"
                f"  {low:.3f}-{high:.3f}"
            )
            figures[f"{name}_p{percent}"] = {
                "alone_seconds": without,
                "beside_seconds": having,
                "ratio": having / without,
                "interval": (low, high),
            }
    publish("caches-beside", args, [], [], pairs=len(pairs), **figures)
