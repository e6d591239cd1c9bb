"""Load on a real server for minutes, with clients that disconnect and malformed requests.

At the end nothing may be left over: every request had exactly one end, no request runs or waits, no KV block is held,
the server's counts equal those of the clients, and memory does not grow. It uses loopback only, and is bounded in time
and number. It exits with 1 and names what is left over, if anything is.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.stage import Server, arguments, publish, say, server
from headrace.lab.bench.client import Answer
from headrace.lab.bench.stats import median
from headrace.lab.workload.work import Work

MALFORMED: tuple[bytes, ...] = (
    *(b"{", b"\xff\xfe", b"[]", b'{"model": "MODEL"}', b'{"model": "no such model", "prompt": "x"}'),
    *(b'{"model": "MODEL", "prompt": %b}' % prompt for prompt in (b'""', b'[1, "a"]', b"[999999999]")),
    *(
        b'{"model": "MODEL", "prompt": "x", %b}' % field
        for field in (b'"max_tokens": -2', b'"temperature": NaN', b'"top_p": "much"', b'"unheard_of": 1')
    ),
)
"""Malformed bodies; they must get a 4xx response and must not affect other requests."""


@dataclass
class Tally:
    """How requests ended, and what went wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)

    def end(self, kind: str, wrong: str = "") -> None:
        self.ends[kind] += 1
        if wrong and len(self.wrong) < 20:
            self.wrong.append(f"{kind}: {wrong}")


class Soak:
    """One client task after the other draws what it does next from its own seeded generator."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession, limit: int) -> None:
        self.tally = Tally()
        self._url = f"{url}/v1/completions"
        self._model = model
        self._session = session
        self._left = limit

    async def client(self, rng: random.Random, until: float) -> None:
        while time.monotonic() < until and self._left > 0:
            self._left -= 1
            roll = rng.random()
            if roll < 0.05:
                await self._malformed(rng)
            else:
                await self._request(rng, vanish=roll < 0.10)

    async def _malformed(self, rng: random.Random) -> None:
        body = rng.choice(MALFORMED).replace(b"MODEL", self._model.encode())
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            status = await response.text()
            bad = not 400 <= response.status < 500 or "error" not in status
            self.tally.end("refused", f"{body!r} got {response.status} {status[:200]}" if bad else "")

    async def _request(self, rng: random.Random, vanish: bool) -> None:
        length = min(400, int(rng.lognormvariate(3.0, 1.0)) + 1)
        prompt = [5] * rng.choice((0, 0, 64)) + rng.choices(range(10, 500), k=rng.randint(1, 200))
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": rng.choice((0.0, 1.0)),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer()
        chunks = rng.randrange(min(10, length)) if vanish else None
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    kind = "overloaded" if response.status == 503 else "failed"
                    self.tally.end(kind, "" if kind == "overloaded" else (await response.text())[:200])
                    return
                async for data in response.content.iter_any():
                    answer.feed(data, 0.0)
                    answer.read()
                    if chunks is not None and len(answer.times) >= chunks and not answer.done:
                        response.close()
                        self.tally.end("vanished")
                        return
        except aiohttp.ClientError as error:
            self.tally.end("failed", f"{type(error).__name__}: {error}")
            return
        work = Work("soak", tuple(prompt), length, ignore_eos=True)
        record = answer.record(work, 0.0, 0.0)
        self.tally.end("failed" if record.error else "finished", record.error)


async def soak(running: Server, args: Any) -> Tally:
    """Runs the clients, sampling the server's memory beside them."""
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{running.url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        run = Soak(running.url, model, session, args.max_requests)
        began = time.monotonic()
        clients = [
            asyncio.create_task(run.client(random.Random(f"{args.seed}-{i}"), began + args.seconds))
            for i in range(args.clients)
        ]
        while not all(task.done() for task in clients):
            run.tally.resident.append((time.monotonic() - began, running.resident_bytes()))
            await asyncio.wait(clients, timeout=args.sample_seconds)
        for task in clients:
            task.result()
        return run.tally


def problems(tally: Tally, idle: dict[str, float], growth: float, args: Any) -> list[str]:
    """The problems found; empty if there are none."""
    wrong = list(tally.wrong)
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wrong += [f"{name} is {idle[name]} when idle" for name in gauges if idle[name]]
    ended, arrived = idle["request_success_total"], idle["e2e_request_latency_seconds_count"]
    if ended != arrived:
        wrong.append(f"{ended:.0f} ends of {arrived:.0f} requests: some ended twice")
    least, more = tally.ends["finished"], tally.ends["vanished"] + tally.ends["refused"]
    if not least <= arrived <= least + more:
        wrong.append(f"the clients saw {least} answers and {more} others, the engine {arrived:.0f} requests")
    if growth > args.max_growth:
        wrong.append(f"memory grew by {100 * growth:.1f} %")
    return wrong


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--max-requests", type=int, default=200_000)
    parser.add_argument("--sample-seconds", type=float, default=5.0)
    parser.add_argument(
        "--kv-bytes", type=int, default=128 << 20, help="small, so that it is all in use soon"
    )
    parser.add_argument("--max-growth", type=float, default=0.02, help="of memory, second half over first")
    args = parser.parse_args()
    with server(args, "--kv-cache-memory-bytes", str(args.kv_bytes)) as running:
        tally = asyncio.run(soak(running, args))
        idle = dict(running.metrics())
        deadline = time.monotonic() + 30.0
        while idle["num_requests_running"] + idle["num_requests_waiting"] and time.monotonic() < deadline:
            time.sleep(0.5)
            idle = dict(running.metrics())
    # The first quarter fills the prefix cache and the allocators; after it nothing may grow.
    settled = [size for _, size in tally.resident[len(tally.resident) // 4 :]]
    half = len(settled) // 2
    growth = median(settled[half:]) / median(settled[:half]) - 1.0 if half else 0.0
    wrong = problems(tally, idle, growth, args)
    publish(
        "soak", args, [], [], ends=tally.ends, resident=tally.resident, growth=growth, wrong=wrong, idle=idle
    )
    say(f"{sum(tally.ends.values())} requests: {json.dumps(tally.ends)}; memory {100 * growth:+.2f} %")
    for problem in wrong:
        say(f"WRONG: {problem}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
