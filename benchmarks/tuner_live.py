"""The tuner on a real engine: the built-in model served in this process.

    python -m benchmarks.tuner_live gain [--start max_num_batched_tokens=16] [--share 0.4] [--seconds 90] [--rounds 3]
    python -m benchmarks.tuner_live cost [--rounds 4]

`gain`: the engine starts with a wrong setting, and requests arrive at random times at a share of the rate that it
sustains with its own settings. The tuner is on for a while. Then the settings at the start, those that the tuner has
left, and the defaults take turns on the same requests (and those of ``--beside``). Printed are the time per generated
token with each, and the tuner's log.

`cost`: clients send request after request. The tuner is off and on "advise" in turns: it rehearses then, and changes
nothing. Printed are the ratios of the throughput of neighbouring rounds, and the tuner's processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx

from headrace.config import options
from headrace.core.engine import Engine
from headrace.core.knobs import Knobs
from headrace.tuning.experiments import Change
from headrace.tuning.tuner import Tuner
from headrace.wiring.server import build_app

Settings = dict[str, Any]
"""Values by the names of the options."""

FIELDS = {
    "mixed_prefill_ratio": "mixed_prefill_ratio",
    "max_num_batched_tokens": "batched_tokens",
    "max_step_seconds": "step_seconds",
}
"""The fields of `Knobs` of these options."""

SLOTS, WINDOW = 16, 3.0
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
MEAN_TOKENS = 50
WARM_SECONDS, ROUND_SECONDS, COST_SECONDS = 5.0, 7.0, 12.0


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


async def sustained(api: httpx.AsyncClient, seconds: float = WARM_SECONDS, seed: int = 0) -> float:
    """Tokens per second of clients that send request after request, one for each slot."""
    rng, tokens, until = random.Random(seed), 0, time.perf_counter() + seconds

    async def client() -> None:
        nonlocal tokens
        while time.perf_counter() < until:
            served = await ask(api, body(rng))
            tokens += served.tokens

    began = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(SLOTS)])
    return tokens / (time.perf_counter() - began)


@asynccontextmanager
async def serving(start: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """A server of the built-in model with these settings, warmed up; its client and its engine."""
    given = {"model": "builtin", "max_num_seqs": SLOTS, "access_log": False, "tuner_window": WINDOW}
    given["enable_prefix_caching"] = False  # the same requests come several times
    engines: list[Engine] = []
    make = Engine.__init__

    def kept(engine: Engine, *args: Any, **named: Any) -> None:
        make(engine, *args, **named)
        engines.append(engine)

    with patch.object(Engine, "__init__", kept):
        app, running = build_app(options({**given, **start}))
    transport = httpx.ASGITransport(app=app)
    async with running, httpx.AsyncClient(transport=transport, base_url="http://live", timeout=120.0) as api:
        await sustained(api)
        yield api, engines[-1]


async def set_mode(api: httpx.AsyncClient, mode: str) -> None:
    """Switch the tuner."""
    (await api.post("/v1/tuner", json={"mode": mode})).raise_for_status()


async def gain(
    start: Settings, beside: Sequence[Settings], share: float, seconds: float, rounds: int
) -> None:
    """Tune a wrong start, and then compare settings in turns."""
    async with serving({}) as (api, engine):
        usual, rate = engine.knobs, share * await sustained(api) / MEAN_TOKENS
    async with serving(start) as (api, engine):
        wrong = engine.knobs
        await set_mode(api, "on")
        during = await part(api, rate, seconds, seed=1)
        report = (await api.get("/v1/tuner")).json()
        tuned = engine.knobs
        await set_mode(api, "off")
        print(f"{rate:.1f} requests/s; while tuning {1e3 * during:.2f} ms per token")
        for line in report["log"]:
            print(f"  {line['at']:7.1f} s  {line['what']}")
        compared = {"start": wrong, "tuned": tuned, "default": usual}
        for each in beside:
            compared[str(each)] = replace(usual, **{FIELDS[name]: value for name, value in each.items()})
        await _turns(api, engine, compared, rate, rounds)


async def _turns(
    api: httpx.AsyncClient, engine: Engine, compared: Mapping[str, Knobs], rate: float, rounds: int
) -> None:
    """Print the time per token with each of these knobs, in rounds of the same requests."""
    found: dict[str, list[float]] = {name: [] for name in compared}
    for number in range(rounds):
        order = list(compared.items())[:: -1 if number % 2 else 1]
        for name, knobs in order:
            engine.knobs = knobs
            found[name].append(1e3 * await part(api, rate, ROUND_SECONDS, seed=100 + number))
    for name, values in found.items():
        faster = [first / own for first, own in zip(found["start"], values, strict=True)]
        shown = ", ".join(f"{each:.2f}" for each in values)
        print(
            f"{name}: median {median(values):.2f} ms per token, {median(faster):.2f} times the start ({shown})"
        )
        print(f"  {compared[name]}")


async def cost(rounds: int) -> None:
    """Compare the throughput with and without rehearsals, in turns."""
    timed = Timed()
    with patch.object(Tuner, "tick", lambda tuner, now, *, frozen: timed.tick(tuner, now, frozen=frozen)):
        async with serving({}) as (api, _):
            found: dict[str, list[float]] = {"off": [], "advise": []}
            for number in range(rounds):
                for mode in list(found)[:: -1 if number % 2 else 1]:
                    await set_mode(api, mode)
                    found[mode].append(await sustained(api, COST_SECONDS, seed=number))
    ratios = [on / off for off, on in zip(found["off"], found["advise"], strict=True)]
    for mode, values in found.items():
        print(f"{mode}: {', '.join(f'{each:.0f}' for each in values)} tokens/s")
    share = timed.seconds / (rounds * COST_SECONDS)
    print(f"advise / off: median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"the tuner takes {share:.1%} of a core")


def settings(text: str) -> Settings:
    """``NAME=VALUE``, separated by commas."""
    pairs = (each.split("=") for each in text.split(","))
    return {name: int(value) if name.startswith("max_num") else float(value) for name, value in pairs}


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("gain", "cost"))
    parser.add_argument(
        "--start", type=settings, default="max_num_batched_tokens=16", metavar="SETTING=VALUE,…"
    )
    parser.add_argument("--beside", type=settings, action="append", default=[], metavar="SETTING=VALUE,…")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the tuner is on")
    parser.add_argument("--share", type=float, default=0.4, help="of the rate that the engine sustains")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "gain":
        asyncio.run(gain(args.start, args.beside, args.share, args.seconds, args.rounds))
    else:
        asyncio.run(cost(args.rounds))


if __name__ == "__main__":
    main()
