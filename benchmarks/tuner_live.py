"""The tuner on a real engine: the built-in model served in this process, which starts with a wrong setting.

    python -m benchmarks.tuner_live [--start max_num_batched_tokens=32] [--seconds 45] [--share 0.6]

Requests arrive at random times, at a share of the rate that the engine sustains with its own settings. First the tuner
is off, then it is on, and then the same requests arrive as in the beginning. Printed are the time per generated token
of each part, the processor time of the tuner, and its log.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx

from headrace.build.server import build_app
from headrace.config import options
from headrace.observe.experiments.conductor import Change
from headrace.observe.tuner.tuner import Tuner

SLOTS, WINDOW = 16, 4.0
WORDS = (
    "river",
    "stone",
    "lamp",
    "garden",
    "winter",
    "paper",
    "song",
    "market",
    "glass",
    "road",
    "cloud",
    "bread",
)
PROMPT_WORDS, OUTPUT_TOKENS = (100, 400), (20, 80)
WARM_SECONDS = 6.0


class Served(NamedTuple):
    """One request: the seconds that its client waited, and its tokens."""

    seconds: float
    tokens: int


def body(rng: random.Random) -> dict[str, Any]:
    """A request that no cache knows."""
    words = rng.choices(WORDS, k=rng.randint(*PROMPT_WORDS))
    return {"prompt": " ".join(words), "max_tokens": rng.randint(*OUTPUT_TOKENS), "ignore_eos": True}


async def ask(api: httpx.AsyncClient, asked: dict[str, Any]) -> Served:
    """Send one request."""
    began = time.perf_counter()
    (await api.post("/v1/completions", json=asked)).raise_for_status()
    return Served(time.perf_counter() - began, asked["max_tokens"])


async def part(api: httpx.AsyncClient, rate: float, seconds: float, seed: int) -> float:
    """Seconds per token of requests that arrive at random for so long; the same ones for the same seed."""
    rng, tasks = random.Random(seed), []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        tasks.append(asyncio.create_task(ask(api, body(rng))))
        await asyncio.sleep(rng.expovariate(rate))
    served = await asyncio.gather(*tasks)
    return sum(each.seconds for each in served) / sum(each.tokens for each in served)


class Timed:
    """Measures the processor time that the tuner takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._tick = Tuner.tick

    def tick(self, tuner: Tuner, now: float, *, frozen: bool) -> Change | None:
        """One call of `Tuner.tick`."""
        began = time.thread_time()
        try:
            return self._tick(tuner, now, frozen=frozen)
        finally:
            self.seconds += time.thread_time() - began


async def sustained(api: httpx.AsyncClient) -> float:
    """Requests per second of clients that send request after request, one for each slot."""
    rng, count, until = random.Random(0), 0, time.perf_counter() + WARM_SECONDS

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await ask(api, body(rng))
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(SLOTS)])
    return count / (time.perf_counter() - began)


async def serve(start: dict[str, Any], share: float, seconds: float) -> None:
    """Run all parts and print."""
    given = {"model": "builtin", "max_num_seqs": SLOTS, "access_log": False, "tuner_window": WINDOW}
    given["enable_prefix_caching"] = False  # the same requests come twice
    app, running = build_app(options({**given}))
    transport = httpx.ASGITransport(app=app)
    async with running, httpx.AsyncClient(transport=transport, base_url="http://live", timeout=120.0) as api:
        rate = share * await sustained(api)
        right = await part(api, rate, seconds / 2, seed=1)
    app, running = build_app(options({**given, **start}))
    transport = httpx.ASGITransport(app=app)
    async with running, httpx.AsyncClient(transport=transport, base_url="http://live", timeout=120.0) as api:
        await sustained(api)
        before = await part(api, rate, seconds, seed=1)
        (await api.post("/v1/tuner", json={"mode": "on"})).raise_for_status()
        began, timed = time.perf_counter(), Timed()
        with patch.object(Tuner, "tick", lambda tuner, now, *, frozen: timed.tick(tuner, now, frozen=frozen)):
            during = await part(api, rate, 1.5 * seconds, seed=2)
            after = await part(api, rate, seconds, seed=1)
        cost = timed.seconds / (time.perf_counter() - began)
        report = (await api.get("/v1/tuner")).json()
    print(
        f"{rate:.1f} requests/s; ms per token: default settings {1e3 * right:.1f}, wrong ones {1e3 * before:.1f}, "
    )
    print(
        f"while tuning {1e3 * during:.1f}, then {1e3 * after:.1f}; {before / after:.2f} times as fast as at the start"
    )
    print(f"the tuner takes {cost:.2%} of a core")
    print({name: each["value"] for name, each in report["settings"].items()}, report["measured_to_rehearsed"])
    for line in report["log"]:
        print(f"{line['at']:7.1f} s  {line['what']}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", default="max_num_batched_tokens=32", metavar="SETTING=VALUE")
    parser.add_argument("--seconds", type=float, default=45.0, help="length of the first part")
    parser.add_argument("--share", type=float, default=0.6, help="of the rate that the engine sustains")
    args = parser.parse_args()
    name, value = args.start.split("=")
    start = {name: int(value) if name.startswith("max_num") else float(value)}
    asyncio.run(serve(start, args.share, args.seconds))


if __name__ == "__main__":
    main()
