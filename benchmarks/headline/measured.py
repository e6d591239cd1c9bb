"""Figures of this machine: servers and engines in processes of their own, by the scripts that measure them alone.

The ratios compare runs that take turns, so that other work on the machine disturbs both. Times of single responses are
medians. Speed with drafts is in CPU time of one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.batching import prefix as shared_prefix
from benchmarks.batching import static
from benchmarks.caches import levels, responses, restart
from benchmarks.drafts import texts
from benchmarks.drafts.widened import write_pair
from benchmarks.headline.record import Figure, table
from benchmarks.semantic.lookup import over_http
from benchmarks.semantic.rules import compare_stream, remembering
from benchmarks.stage import target
from headrace.compute.encoder.sentences import Sentences
from headrace.lab.bench.report import compare
from headrace.lab.bench.stats import median
from headrace.lab.workload.dataset import fixed_lengths
from headrace.response_cache.rules.calibration import CONFIDENCE
from headrace.response_cache.semantic.calibrate import Stream, read_rows

PLACE = "CPU, two cores"
SHAPE = "smollm2-135m"

Found = tuple[list[Figure], list[dict[str, Any]]]


class Setting(NamedTuple):
    """Where the data is, where the scripts write their own reports, and whether to be quick."""

    data: Path | None
    reports: Path
    quick: bool

    def args(self, parser: argparse.ArgumentParser, name: str, *flags: str) -> argparse.Namespace:
        """The arguments of a script."""
        return parser.parse_args([*flags, "--output", str(self.reports / f"{name}.json")])


def batching(setting: Setting) -> Found:
    """Continuous batching, static batches of Headrace, and padded batches of transformers."""
    few = ("--num-prompts", "24", "--sweep-prompts", "8", "--batch-sizes", "8", "--rounds", "1")
    usual = ("--num-prompts", "60", "--sweep-prompts", "30", "--batch-sizes", "32", "64", "--rounds", "1")
    args = setting.args(static.parser(), "batching", *(few if setting.quick else usual))
    ratios = static.measured(args)["ratios"]
    figures = [
        Figure(
            "static",
            ratios["output_tokens_per_second against static"],
            PLACE,
            f"each at its best size, static batches of Headrace, {args.num_prompts} requests",
            "these static batches are not padded and free the rows of ended outputs, and on a CPU a row costs "
            "arithmetic: a step of few rows is much cheaper than a full one, so half-empty batches waste little",
        ),
        Figure(
            "static",
            ratios["output_tokens_per_second against transformers"],
            PLACE,
            f"each at its best size, padded batches of transformers, {args.num_prompts} requests",
            "a quick run has few requests",
        ),
    ]
    return figures, []


def prefix(setting: Setting) -> Found:
    """TTFT of chats under a shared system prompt, over HTTP."""
    args = setting.args(shared_prefix.parser(), "prefix", "--rounds", "1" if setting.quick else "5")
    seconds = shared_prefix.measured(args)
    saved = 100.0 * (1.0 - seconds["later"] / seconds["first"])
    limit = "the requests wait for the event loop of a busy machine"
    return [
        Figure("ttft", saved, PLACE, "built-in model, system prompt of 1,000 tokens, over HTTP", limit)
    ], []


def exact(setting: Setting) -> Found:
    """A response from the exact cache, over HTTP."""
    few = ("--rounds", "1", "--calls", "50", "--crowd", "10", "--stores")
    usual = ("--rounds", "3", "--calls", "300", "--crowd", "100", "--stores", "redis")
    rows = responses.measured(setting.args(responses.parser(), "exact", *(few if setting.quick else usual)))
    busy = "the machine was busy: the median of a quiet one is below"
    figures = [
        Figure(
            "exact", 1e3 * row["p50_seconds"], PLACE, f"over HTTP, {name.removeprefix('hit, ')}, median", busy
        )
        for name, row in rows.items()
        if name.startswith("hit")
    ]
    return figures, []


def semantic(setting: Setting) -> Found:
    """A response from the semantic cache over HTTP, and the hits that it adds on labelled questions."""
    sentences, entries = Sentences.from_name(), 500 if setting.quick else 5000
    seconds = median(over_http(sentences, entries))
    figures = [
        Figure(
            "semantic",
            1e3 * seconds,
            PLACE,
            f"over HTTP, {entries:,} entries, median",
            "the machine was busy",
        )
    ]
    if setting.data is None:
        return figures, []
    stream = read_rows(setting.data / "semantic" / "clinc150_train.json")
    assert isinstance(stream, Stream)
    bounds = (0.01, 0.02, 0.05)
    lines = compare_stream(stream, remembering(sentences), bounds, CONFIDENCE, seed=0)
    judged = {line.max_error: line.outcome for line in lines if line.rule == "judge"}
    figures.append(
        Figure("hits", 100.0 * judged[0.02].hit_rate, PLACE, "CLINC150, at most 2 % of the hits wrong")
    )
    rows = [
        (100.0 * bound, 100.0 * each.hit_rate, 100.0 * each.wrong_per_hit) for bound, each in judged.items()
    ]
    caption = (
        "Share of CLINC150's questions that similar ones serve, by error bound; no question is asked twice, so an "
        "exact cache serves none. One order, the half that was not used for fitting."
    )
    columns = ("error bound, %", "served, %", "wrong, %")
    return figures, [table("headline-semantic", caption, columns, rows)]


def caches(setting: Setting) -> Found:
    """All cache levels over HTTP, each switched on alone and all together."""
    if setting.data is None:
        return [], []
    few, usual = ("--rounds", "1", "--requests", "60", "--before", "30"), ("--rounds", "1")
    args = setting.args(
        levels.parser(), "caches", "--data", str(setting.data), *(few if setting.quick else usual)
    )
    found: Mapping[str, Mapping[str, float]] = levels.measured(args)
    off = found["off"]
    rows = [
        (name, each["computed_tokens"], each["cost"] / off["cost"], each["hits"], each["near"], each["wrong"])
        for name, each in found.items()
    ]
    share = 100.0 * found["exact+semantic"]["near"] / args.requests
    figures = [
        Figure(
            "hits",
            share,
            PLACE,
            "a mixed load, 15 % of it in other words",
            "the cache certifies its errors: it serves nothing below 300 entries and no answer that was cut at its "
            "length, and only 15 % of this load could be served at all",
        ),
        Figure(
            "prompt",
            100.0 * (1.0 - found["prefix"]["computed_tokens"] / off["computed_tokens"]),
            PLACE,
            "computed tokens of the mixed load, over HTTP, system prompt of 220 tokens",
            "outputs count too",
        ),
    ]
    caption = (
        f"{args.requests} greedy chats over HTTP, a third of them repeats: tokens computed, relative cost, and hits, "
        "each cache alone and all together."
    )
    columns = ("caches on", "tokens computed", "relative cost", "exact hits", "semantic hits", "wrong hits")
    return figures, [table("headline-caches", caption, columns, rows)]


def drafts(setting: Setting) -> Found:
    """Speed with drafts at batch 1, real text: edits with a prediction, and stories by the draft model."""
    figures, rows = [], []
    rounds = ("--rounds", "2" if setting.quick else "3", "--output-len", "60" if setting.quick else "150")
    for kind, says in (("edits", "edits with a prediction"), ("chats", "stories, the built-in draft model")):
        flags = (kind, "--clock", "cpu", "--batches", "1", *rounds)
        shape = () if setting.quick else ("--shape", SHAPE)
        args = setting.args(texts.parser(), f"drafts-{kind}", *flags, *shape)
        rows += [
            (says, int(each["batch"]), each["ratio"], 100.0 * each["accepted"], each["tokens_per_step"])
            for each in texts.measured(args)
        ]
        figures.append(
            Figure(
                "drafts",
                next(ratio for text, batch, ratio, *_ in rows if (text, batch) == (says, 1)),
                PLACE,
                f"{says}, CPU time of one thread",
                "on one thread of a CPU a step with drafts costs arithmetic, so tokens that are verified are not free",
            )
        )
    caption = "Speed with drafts ÷ without, real text, in CPU time of one thread, SmolLM2-135M's size."
    columns = ("text", "requests at once", "speed, ratio", "accepted, %", "tokens per step and request")
    return figures, [table("headline-drafts", caption, columns, rows)]


def quantized(setting: Setting) -> Found:
    """Decoding speed of quantized weights, and a step of 32 rows beside a step of one."""
    rounds, tokens, batches = (2, 16, (1,)) if setting.quick else (5, 24, (1,))
    rows: list[tuple[str, int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        model, _ = write_pair(SHAPE, Path(folder))
        args = argparse.Namespace(model=str(model), device="cpu")
        engines = [target("bfloat16=headrace", args, dtype="bfloat16", kv_cache_memory_bytes=1 << 28)]
        engines += [
            target(
                f"{each}=headrace", args, quantization=each, dtype="bfloat16", kv_cache_memory_bytes=1 << 28
            )
            for each in ("int8", "int4", "w4a8")
        ]
        for batch in batches:
            work = fixed_lengths(batch, 16, tokens)
            compare(engines, work, 1)  # warms up
            result = compare(engines, work, rounds)
            rows += [(each.name, batch, 1.0 / result.ratios[each.name]["tpot_p50"]) for each in engines[1:]]
        for each in engines:
            each.close()
    alone = {name: ratio for name, batch, ratio in rows if batch == 1}
    limit = (
        "weights are read faster, but norms, attention and the embedding are not; and on a busy machine the bandwidth "
        "is shared"
    )
    best = max(("int4", "w4a8"), key=lambda name: alone[name])
    figures = [
        Figure("int8", alone["int8"], PLACE, "SmolLM2-135M's size, one request", limit),
        Figure("int4", alone[best], PLACE, f"{best}, SmolLM2-135M's size, one request", limit),
    ]
    caption = (
        "Decoding speed with quantized weights ÷ bfloat16, SmolLM2-135M's size: medians of "
        f"{rounds} rounds in turns."
    )
    return figures, [
        table("headline-quantized", caption, ("weights", "requests at once", "speed, ratio"), rows)
    ]


def peak(setting: Setting) -> Found:
    """Device time of the first requests after a restart, with and without warming."""
    if setting.data is None:
        return [], []
    few = ("--requests", "60", "--recorded", "100", "--rounds", "1")
    usual = ("--requests", "300", "--recorded", "1000", "--rounds", "3")
    flags = ("--data", str(setting.data), *(few if setting.quick else usual))
    found = restart.measured(setting.args(restart.parser(), "peak", *flags))
    saved = 100.0 * (1.0 - found["warmed"]["step_seconds"] / found["cold"]["step_seconds"])
    rows = [(name, 100.0 * each["hit_rate"], each["step_seconds"]) for name, each in found.items()]
    caption = (
        "The peak after a restart at night, 150 questions of which the k-th is asked 1/k as often as the first: hits, "
        "and time of all steps, with empty caches and with caches warmed from the history. Medians of the rounds."
    )
    columns = ("caches", "hits, %", "time of all steps, s")
    return (
        [Figure("peak", saved, PLACE, "time of all steps, repeated questions", "few requests")],
        [table("headline-peak", caption, columns, rows)],
    )


PARTS: Sequence[Callable[[Setting], Found]] = (
    *(batching, prefix, exact, semantic, caches, drafts, quantized, peak),
)
