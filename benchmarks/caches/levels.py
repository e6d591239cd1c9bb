"""What each cache saves on a trace with repeats: ``python -m benchmarks.caches levels --data FOLDER``.

The trace has ``--requests`` greedy chat requests under one system prompt: 30 % are exact repeats, 15 % paraphrases, 5 %
repeats with three times the length, and the rest are new. A repeat comes at a random position after its original.

New requests are prompts of ``prompts/*.jsonl``, answered with a fixed number of tokens, and the first queries of pairs,
answered with one sentence. A pair is two queries of one intent of ``semantic/clinc150_train.json``. ``--before`` other
queries of the intents are sent before, unmeasured, because a semantic cache with few entries serves nothing.

Variants are: all caches on, each alone, and all off. Each has a fresh server per round. The order of variants is
reversed in every second round, and the times of all rounds of a variant are pooled. The semantic cache and the cache of
partial answers need the exact cache, so they are shown together with it. The semantic cache is calibrated on half of
the queries of the intents, and the trace uses the other half.

Texts are compared with those of the server without caches. A semantic hit has the text of another query by design, so
it is counted separately: it is wrong if no query of its intent got that text without caches.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import httpx
from rich.table import Table

from benchmarks.stage import Server, arguments, publish, read_prompts, say, server
from headrace.compute.encoder.sentences import Sentences
from headrace.lab.bench.stats import percentile
from headrace.response_cache.semantic.calibrate import Stream, calibrate, read_rows

SYSTEM = (
    "You are the assistant of a public library. Answer in plain words, name your sources where you have any, and say "
    "so when you are not sure. Do not give medical or legal advice. Keep your answers short unless you are asked for "
    "more. When a question has several readings, take the most likely one and say which it was. "
) * 2
SHORT, LONG = 32, 96
PRICES = (0.5, 1.5)
"""Price of a million prompt tokens and of a million generated tokens, in any currency."""

MEMORY = ("--response-cache", "memory")
NO_PARTIAL = ("--resume-cache-bytes", "0")
NO_PREFIX = ("--no-enable-prefix-caching",)


class Ask(NamedTuple):
    """One request; ``kind`` is new, exact, paraphrase or longer, ``intent`` is empty if its query has none."""

    text: str
    kind: str
    intent: str = ""
    max_tokens: int = SHORT


class Answer(NamedTuple):
    """The text, its duration, and the response header of the caches."""

    text: str
    seconds: float
    note: str


class Figures(NamedTuple):
    """The result of one run of a variant."""

    computed_tokens: float
    generated_tokens: float
    seconds: float
    before: list[Answer]
    answers: list[Answer]

    @property
    def cost(self) -> float:
        """The cost of the computed tokens at `PRICES`."""
        prompt = self.computed_tokens - self.generated_tokens
        return (prompt * PRICES[0] + self.generated_tokens * PRICES[1]) / 1e6


def make_trace(
    data: Path, intents: Stream, requests: int, before: int, seed: int
) -> tuple[list[Ask], list[Ask]]:
    """The requests sent before, and the trace in order; equal for equal seeds."""
    rng = random.Random(seed)
    exact, alike, longer = round(0.3 * requests), round(0.15 * requests), round(0.05 * requests)
    questions = defaultdict(set)
    for row in intents.rows:
        questions[row.answer].add(row.text)
    pairs = {
        intent: rng.sample(sorted(questions[intent]), 2) for intent in rng.sample(sorted(questions), alike)
    }
    new = [Ask(text, "new") for text in rng.sample(read_prompts(data), requests - exact - 2 * alike - longer)]
    placed = [(rng.random(), ask) for ask in new]
    placed += [(rng.random(), Ask(first, "new", intent)) for intent, (first, _) in pairs.items()]
    after = {ask: at for at, ask in placed}
    placed += [
        (rng.uniform(after[Ask(first, "new", intent)], 1.0), Ask(second, "paraphrase", intent))
        for intent, (first, second) in pairs.items()
    ]
    for kind, count, among in (("exact", exact, list(after)), ("longer", longer, new)):
        for ask in rng.choices(among, k=count):
            again = ask._replace(kind=kind, max_tokens=LONG if kind == "longer" else SHORT)
            placed.append((rng.uniform(after[ask], 1.0), again))
    paired = {text for pair in pairs.values() for text in pair}
    left = [Ask(row.text, "before", row.answer) for row in intents.rows if row.text not in paired]
    return rng.sample(left, before), [ask for _, ask in sorted(placed)]


def replay(earlier: list[Ask], trace: list[Ask], args: Namespace, flags: tuple[str, ...]) -> Figures:
    """Send the earlier requests and the trace to a fresh server, and measure the trace."""
    with server(args, "--dtype", args.dtype, *flags) as running:
        known = asyncio.run(_ask_all(running, earlier, math.inf))
        _settle(running)
        before = running.metrics()
        begin = time.perf_counter()
        answers = asyncio.run(_ask_all(running, trace, args.rate))
        seconds = time.perf_counter() - begin
        after = running.metrics()
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    computed, generated = gained["iteration_tokens_total_sum"], gained["generation_tokens_total"]
    return Figures(computed, generated, seconds, known, answers)


def _settle(running: Server) -> None:
    """Wait until the semantic cache has indexed all responses."""
    known = -1.0
    while known != (known := running.metrics().get("response_cache_entries", 0.0)):
        time.sleep(1.0)


async def _ask_all(running: Server, trace: list[Ask], rate: float) -> list[Answer]:
    """Send the trace with Poisson arrivals at ``rate`` per second; without a rate, four requests at a time."""
    rng = random.Random(1)
    few = asyncio.Semaphore(4 if rate == math.inf else len(trace))

    async def answered(client: httpx.AsyncClient, ask: Ask, at: float) -> Answer:
        await asyncio.sleep(at)
        async with few:
            return await _ask(client, ask)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=running.url, timeout=120.0, limits=limits, trust_env=False
    ) as client:
        times = accumulate(rng.expovariate(1.0) / rate for _ in trace)
        return await asyncio.gather(
            *(answered(client, ask, at) for ask, at in zip(trace, times, strict=True))
        )


async def _ask(client: httpx.AsyncClient, ask: Ask) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask.text}]
    body = {"messages": messages, "temperature": 0, "max_tokens": ask.max_tokens}
    if ask.intent:
        body["stop"] = "."
    begin = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - begin
    response.raise_for_status()
    note = response.headers.get("X-Headrace-Cache", "")
    return Answer(response.json()["choices"][0]["message"]["content"], seconds, note)


def judged(
    runs: list[Figures], trace: list[Ask], truth: list[Answer], right: Mapping[str, set[str]]
) -> dict[str, float]:
    """The figures of a variant: counts of its run of median duration, and times of all runs.

    ``truth`` are the answers without caches, ``right`` the texts that a question, or one of its intent, got there.
    """
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    notes = [answer.note for answer in middle.answers]
    similar = [note.startswith("hit; layer=semantic") for note in notes]
    same = [a.text == b.text for a, b, hit in zip(middle.answers, truth, similar, strict=True) if not hit]
    times = [answer.seconds for run in runs for answer in run.answers]
    return {
        "tokens computed": middle.computed_tokens,
        "tokens generated": middle.generated_tokens,
        "cost": middle.cost,
        "p50, ms": 1e3 * percentile(times, 50),
        "p99, ms": 1e3 * percentile(times, 99),
        "seconds": statistics.median(run.seconds for run in runs),
        "exact hits": sum(note.startswith(("hit; layer=exact", "coalesced")) for note in notes),
        "partial hits": notes.count("partial"),
        "semantic hits": sum(similar),
        "wrong": sum(
            hit and answer.text not in right[ask.intent or ask.text]
            for ask, answer, hit in zip(trace, middle.answers, similar, strict=True)
        ),
        "equal texts": sum(same),
        "texts compared": len(same),
    }


def measure(args: Namespace, earlier: list[Ask], trace: list[Ask], semantic: tuple[str, ...]) -> None:
    """Replay the trace in every variant, print, and write."""
    variants: dict[str, tuple[str, ...]] = {
        "none": NO_PREFIX,
        "prefix": (),
        "exact": (*MEMORY, *NO_PARTIAL, *NO_PREFIX),
        "exact and partial": (*MEMORY, *NO_PREFIX),
        "exact and semantic": (*MEMORY, *NO_PARTIAL, *NO_PREFIX, *semantic),
        "all": (*MEMORY, *semantic),
    }
    rounds: dict[str, list[Figures]] = {name: [] for name in variants}
    for number in range(args.rounds):
        for name, flags in list(variants.items())[:: -1 if number % 2 else 1]:
            rounds[name].append(replay(earlier, trace, args, flags))
    truth, right = rounds["none"][0].answers, defaultdict[str, set[str]](set)
    for ask, answer in zip(earlier + trace, rounds["none"][0].before + truth, strict=True):
        right[ask.intent or ask.text].add(answer.text)
    results = {name: judged(runs, trace, truth, right) for name, runs in rounds.items()}
    kinds = Counter(ask.kind for ask in trace)
    table = Table("caches on", *results["none"], title=f"{len(trace)} requests: {dict(kinds)}; {args.dtype}")
    for name, found in results.items():
        table.add_row(
            name, *(f"{value:,.4f}" if 0 < value < 1 else f"{value:,.0f}" for value in found.values())
        )
    say(table)
    publish("caches-levels", args, [], [], requests=kinds, caches=results)


def main() -> None:
    """Measure with the options of the command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts/ and semantic/")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--dtype", default="float32", help="in float32 no near-tie decides a token")
    parser.add_argument("--before", type=int, default=500, help="questions asked before the trace")
    parser.add_argument("--semantic-max-error", default="0.02", help="share of its hits that may be wrong")
    args = parser.parse_args()
    stream = read_rows(args.data / "semantic" / "clinc150_train.json")
    assert isinstance(stream, Stream)
    known, new = stream.shuffled(args.seed).halves()
    asked = make_trace(args.data, new, args.requests, args.before, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        sentences = Sentences.from_name()
        path.write_text(calibrate(known, sentences.embed, sentences.name, args.seed).to_text())
        semantic = ("--semantic-cache", "serve", "--semantic-calibration", str(path))
        measure(args, *asked, (*semantic, "--semantic-max-error", args.semantic_max_error))
