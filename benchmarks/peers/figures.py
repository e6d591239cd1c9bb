"""The metrics of a race, from the client's records; seconds and tokens as in `headrace.lab.bench.stats`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.quiet import SERVER
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Record, median


def decode_rate(records: Sequence[Record]) -> float:
    """Tokens per second while every request decodes: from the last first token to the first last token.

    NaN if there is no such time, because a request ended before another got its first token. A chunk counts as many
    tokens as the chunks of its answer have on average.
    """
    whole = [record for record in records if not record.error and record.token_seconds]
    if not whole or len(whole) < len(records):
        return math.nan
    begin = max(record.token_seconds[0] for record in whole)
    end = min(record.token_seconds[-1] for record in whole)
    if end <= begin:
        return math.nan
    tokens = sum(
        sum(begin < at <= end for at in record.token_seconds)
        * record.output_tokens
        / len(record.token_seconds)
        for record in whole
    )
    return tokens / (end - begin)


def prefill_rate(records: Sequence[Record]) -> float:
    """Prompt tokens per second until the first token, in the median over requests that ran alone; NaN of none."""
    return median([r.prompt_tokens / r.ttft for r in records if not r.error and r.ttft])


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the table: its title, how a run is read, and whether more is better."""

    title: str
    read: Callable[[Run], float]
    more_is_better: bool = True


_OUTPUT = Figure("output tok/s", lambda run: run.summary.output_tokens_per_second)
_TTFT = Figure("TTFT p50 ms", lambda run: 1000 * run.summary.ttft.p50, False)
_TTFT_TAIL = Figure("TTFT p99 ms", lambda run: 1000 * run.summary.ttft.p99, False)
_CPU = Figure("server CPU s", lambda run: float(run.facts.get(SERVER, math.nan)), False)
_ITL_TAIL = Figure("ITL p99 ms", lambda run: 1000 * run.summary.itl.p99, False)
_TPOT = Figure("TPOT p50 ms", lambda run: 1000 * run.summary.tpot.p50, False)
_CLOSED_LOOP = (_OUTPUT, _TPOT, _ITL_TAIL, _TTFT, _TTFT_TAIL, _CPU)

FIGURES: Mapping[str, Sequence[Figure]] = {
    "decode": (Figure("decode tok/s", lambda run: decode_rate(run.records)), _OUTPUT, _TTFT, _CPU),
    "prefill": (Figure("prefill tok/s", lambda run: prefill_rate(run.records)), _TTFT, _CPU),
    "mixed": _CLOSED_LOOP,
    "long": (_OUTPUT, _TTFT, _ITL_TAIL, _CPU),
    "shared": _CLOSED_LOOP,
}
"""The metrics of each workload, the main one first."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One contender's medians over rounds, by title, and the medians of its ratios to the first contender's."""

    name: str
    failed: int
    values: Mapping[str, float]
    ratios: Mapping[str, float]


def standings(rounds: Sequence[Sequence[Run]], figures: Sequence[Figure]) -> list[ReplicaLoad]:
    """The table's rows from each round's runs, in their order. A ratio above 1 means faster than the first."""
    told = []
    for column, first in enumerate(rounds[0]):
        values, ratios = {}, {}
        for figure in figures:
            seen = [figure.read(runs[column]) for runs in rounds]
            base = [figure.read(runs[0]) for runs in rounds]
            values[figure.title] = median([value for value in seen if not math.isnan(value)])
            pairs = [(a, b) if figure.more_is_better else (b, a) for a, b in zip(seen, base, strict=True)]
            ratios[figure.title] = median([a / b for a, b in pairs if b > 0 and not math.isnan(a)])
        failed = sum(runs[column].summary.failed for runs in rounds)
        told.append(ReplicaLoad(first.target, failed, values, ratios))
    return told
