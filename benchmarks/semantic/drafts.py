"""Drafts from the cached responses of similar requests: accepted share and time saved, over HTTP.

Each pair is a request and a paraphrase of it. The first one is answered by the server with ``--semantic-cache draft``,
which caches it. The second one is timed on this server and on one without caches and drafts, in alternating order, and
both must write the same text. The built-in model writes different texts to most paraphrases, as other models do: what
they have in common is what a draft can save.

The pairs are requests that the built-in model can answer, or those with ``same`` = 1 of ``--data`` (a CSV file with
text_a, text_b, same).
"""

from __future__ import annotations

import csv
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.stage import Server, arguments, publish, say, server

SPECULATION = '{"method": "cached"}'
NAMES = (
    "Mia",
    "Tom",
    "Anna",
    "Ben",
    "Lily",
    "Max",
    "Sara",
    "Leo",
    "Emma",
    "Jack",
    "Nora",
    "Finn",
    "Ada",
    "Otto",
)
HEROES = ("fox", "mouse", "dragon", "robot", "owl", "sailor", "baker", "cat", "bear", "frog", "rabbit", "dog")
WAYS = (
    "Tell me a short story about {}.",
    "Please tell me a short story about {}.",
    "Tell me a little story about {}.",
    "Write a short story about {}",
    "Can you tell me a short story about {}?",
    "I would like a short story about {}.",
)


class Pair(NamedTuple):
    """A request and its paraphrase."""

    first: str
    second: str


class Answer(NamedTuple):
    """A text, its tokens, the seconds it took, and the accepted and rejected drafts."""

    text: str
    tokens: int
    seconds: float
    accepted: int
    rejected: int


def written(count: int, seed: int) -> Iterator[Pair]:
    """Pairs about ``count`` different subjects."""
    rng = random.Random(seed)
    subjects = [f"a {hero} named {name}" for hero, name in itertools.product(HEROES, NAMES)]
    subjects += [f"a {hero} and {name}" for hero, name in itertools.product(HEROES, NAMES)]
    rng.shuffle(subjects)
    for subject in subjects[:count]:
        first, second = rng.sample(WAYS, 2)
        yield Pair(first.format(subject), second.format(subject))


def labelled(path: Path, count: int) -> Iterator[Pair]:
    """The first pairs of a file that are labelled as the same."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = (row for row in csv.DictReader(file) if row["same"] == "1")
        for row in itertools.islice(rows, count):
            yield Pair(row["text_a"], row["text_b"])


def ask(running: Server, text: str, tokens: int) -> Answer:
    """One chat, greedy."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": tokens}
    before = running.metrics()
    began = time.perf_counter()
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False)
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    after, results = running.metrics(), answer.json()
    drafted, accepted = (
        int(after.get(name, 0.0) - before.get(name, 0.0))
        for name in ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    )
    text = results["choices"][0]["message"]["content"]
    return Answer(text, results["usage"]["completion_tokens"], seconds, accepted, drafted - accepted)


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, default=None, help="CSV file of labelled pairs")
    parser.add_argument("--pairs", type=int, default=240)
    parser.add_argument("--deadline", type=float, default=0.1, help="seconds of a semantic lookup at most")
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()
    pairs = list(labelled(args.data, args.pairs) if args.data else written(args.pairs, args.seed))
    caching = ["--response-cache", "memory", "--semantic-cache", "draft", "--speculative-config", SPECULATION]
    caching += ["--semantic-deadline", str(args.deadline)]
    different, ratios, plain_answers, drafted_answers = 0, list[float](), list[Answer](), list[Answer]()
    with (
        server(args, "--dtype", "float32") as plain,
        server(args, "--dtype", "float32", *caching) as drafting,
    ):
        for number, pair in enumerate(pairs):
            ask(drafting, pair.first, args.max_tokens)
            time.sleep(0.02)  # the response is cached after it has been sent
            order = (plain, drafting) if number % 2 else (drafting, plain)
            results = {running.url: ask(running, pair.second, args.max_tokens) for running in order}
            without, with_drafts = results[plain.url], results[drafting.url]
            different += without.text != with_drafts.text
            plain_answers.append(without)
            drafted_answers.append(with_drafts)
            ratios.append(without.seconds / with_drafts.seconds)
    found = {
        "pairs": len(pairs),
        "different_texts": different,
        "pairs_with_drafts": sum(each.accepted + each.rejected > 0 for each in drafted_answers),
        "tokens": sum(each.tokens for each in drafted_answers),
        "accepted": sum(each.accepted for each in drafted_answers),
        "rejected": sum(each.rejected for each in drafted_answers),
        "seconds_without": sum(each.seconds for each in plain_answers),
        "seconds": sum(each.seconds for each in drafted_answers),
        "median_ratio": statistics.median(ratios),
    }
    drafted = max(1, found["accepted"] + found["rejected"])
    say(
        f"{len(pairs)} pairs, {different} with another text, {found['pairs_with_drafts']} with drafts;"
        f" {found['accepted'] / drafted:.0%} of the drafted tokens accepted, which are"
        f" {found['accepted'] / max(1, found['tokens']):.0%} of all tokens; time without drafts to time with them:"
        f" {found['seconds_without'] / found['seconds']:.2f}x in all, {found['median_ratio']:.2f}x at the median"
    )
    publish("semantic-drafts", args, [], [], **found)
