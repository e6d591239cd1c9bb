from __future__ import annotations

import math

import pytest

from benchmarks.peers.figures import FIGURES, Figure, decode_rate, prefill_rate, standings
from benchmarks.peers.race import table
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Record, summarize


def record(name: str, *times: float, tokens: int | None = None, prompt: int = 100, error: str = "") -> Record:
    count = len(times) if tokens is None else tokens
    return Record(name, 0.0, times[-1], times, prompt_tokens=prompt, output_tokens=count, error=error)


def run(target: str, *records: Record) -> Run:
    return Run(target, records, summarize(records))


def test_decoding_counts_while_all_requests_decode():
    # both decode from 2 to 5: the early token of one and the late one of the other are outside
    early, late = record("a", 1.0, 2.0, 3.0, 4.0, 5.0), record("b", 2.0, 3.0, 4.0, 5.0, 6.0)
    assert decode_rate([early, late]) == pytest.approx(2.0)


def test_parts_of_several_tokens_count_as_many():
    assert decode_rate([record("a", 1.0, 2.0, 3.0, tokens=6)]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record("a", 1.0, 2.0), record("b", 3.0, 4.0)],  # one had ended before the other began
        [record("a", 1.0, 2.0), record("b", 1.0, 2.0, error="HTTP 500")],
    ],
)
def test_there_is_no_decode_rate_where_not_all_decoded_together(records):
    assert math.isnan(decode_rate(records))


def test_prefill_is_prompt_tokens_over_the_time_to_the_first_token():
    assert prefill_rate([record("a", 0.5), record("b", 2.0), record("c", 1.0)]) == pytest.approx(100.0)


RATE = Figure("tok/s", lambda run: run.summary.output_tokens_per_second)
WAIT = Figure("TTFT", lambda run: run.summary.ttft.p50, more_is_better=False)


def test_standings_are_medians_over_rounds_and_ratios_within_them():
    rounds = [
        [run("ours", record("a", seconds)), run("theirs", record("a", factor * seconds))]
        for seconds, factor in ((1.0, 2.0), (10.0, 4.0), (2.0, 3.0))
    ]
    ours, theirs = standings(rounds, [RATE, WAIT])
    assert ours.values == pytest.approx({"tok/s": 0.5, "TTFT": 2.0})
    assert ours.ratios == pytest.approx({"tok/s": 1.0, "TTFT": 1.0})
    assert theirs.ratios == pytest.approx({"tok/s": 1 / 3, "TTFT": 1 / 3})  # slower in both


def test_failures_are_shown_after_the_name():
    broken = run("theirs", record("a", 1.0), record("b", 1.0, error="HTTP 500"))
    rows = standings([[run("ours", record("a", 1.0)), broken]] * 2, FIGURES["mixed"])
    assert [row.failed for row in rows] == [0, 2]
    assert list(table(rows, FIGURES["mixed"], "a race").columns[0].cells) == ["ours", "theirs (2 failed)"]
