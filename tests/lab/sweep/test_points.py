"""Points, bound, report and picture of a sweep, over runs made by hand."""

import csv
from dataclasses import replace

import pytest

from headrace.lab import sweep as report
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Record, summarize
from headrace.lab.plan.roofline import H100, SHAPES, Replica
from headrace.lab.sweep import (
    Axis,
    Lengths,
    Sizes,
    Trial,
    fitting,
    ideal,
    lengths,
    lines,
    plot,
    point,
    tokens_per_second,
)
from headrace.lab.workload.work import Work


def run(seconds, blocks=10, tokens=10):
    times = tuple(seconds * (i + 1) / tokens for i in range(tokens))
    record = Record("r", 0.0, seconds, times, 5, tokens, 0, "length", "")
    return Run("x", [record], summarize([record]), {"kv_blocks_peak": blocks})


def a_sweep():
    sizes = Sizes(1 << 20, 1 << 19, 1 << 10)
    return [
        point(Trial(axis, value, policy), [run(10.0 / value), run(11.0 / value)], sizes, 500.0)
        for axis in (Axis.CHUNK, Axis.BATCH)
        for value in (1, 2, 4)
        for policy in ("continuous", "static")
    ]


def test_a_point_is_the_median_of_its_rounds_with_their_range():
    sizes = Sizes(1000, 100, 10)
    runs = [run(10.0), run(20.0), run(5.0, blocks=30)]
    found = point(Trial(Axis.BATCH, 4, "continuous"), runs, sizes, None)
    assert (found.tokens_per_second, found.slowest, found.fastest) == (1.0, 0.5, 2.0)
    assert (found.rounds, found.requests, found.failed) == (3, 3, 0)
    assert found.memory_bytes == 1000 + 100 + 30 * 10
    assert found.ttft_p50 == pytest.approx(1.0)
    assert point(found.trial, runs, None, None).memory_bytes is None


SLO = {"e2e": 4.0, "ttft": 1.0}


def fitted(*seconds):
    """The fit of a curve whose value 1, 2, 4 … takes so many seconds a request."""
    curve = [
        point(Trial(Axis.BATCH, 1 << i, "continuous"), [run(each)], None, None, SLO)
        for i, each in enumerate(seconds)
    ]
    return fitting(curve, 0.95)


def test_the_largest_value_within_targets_and_the_target_that_binds():
    found = fitted(2.0, 1.0, 3.0, 5.0)
    assert found.largest.trial.value == 4
    assert found.fastest.trial.value == 2, "it has the most throughput of those within"
    assert (found.beyond.trial.value, found.binding) == (8, "e2e")
    text = found.sentence("batch size, continuous", SLO, 0.95)
    assert "4 is the largest value within e2e 4000 ms, ttft 1000 ms for 95 % of the requests" in text
    assert "e2e binds: at 8, 0.0 % of the requests meet it." in text
    assert "2 has the most throughput" in text


def test_a_curve_within_its_targets_has_none_that_binds_and_one_outside_has_no_largest():
    assert fitted(1.0, 2.0).binding is None
    assert "No target binds: try larger values." in fitted(1.0).sentence("x", SLO, 0.95)
    none = fitted(20.0, 30.0)
    assert (none.largest, none.fastest) == (None, None)
    assert none.sentence("x", SLO, 0.95).startswith("x: no value is within")


@pytest.mark.parametrize("start", [0.0, 1e-5], ids=["virtual time", "real clock"])
def test_requests_of_the_start_of_a_closed_loop_do_not_count_towards_targets(start):
    burst = Record("a", start, 9.0, (9.0,), 5, 1, 0, "length", "")
    later = Record("b", 9.0, 9.5, (9.5,), 5, 1, 0, "length", "")
    both = Run("x", [burst, later], summarize([burst, later]))
    found = point(Trial(Axis.BATCH, 1, "static"), [both], None, None, SLO)
    assert found.slo_share == 1.0
    assert found.met == {"e2e": 1.0, "ttft": 1.0}
    assert found.goodput == pytest.approx(2 / 9.5, rel=1e-4)


def test_lines_are_ordered_by_value():
    curves = lines(a_sweep())
    assert list(curves) == [Axis.BATCH, Axis.CHUNK]
    assert [each.trial.value for each in curves[Axis.BATCH]["static"]] == [1, 2, 4]


def test_tables_sentences_and_files(tmp_path):
    points = a_sweep()
    tables = report.tables(points, "title")
    assert [table.row_count for table in tables] == [3, 3]
    assert len(tables[0].columns) == 1 + 2 * 4 + 2
    assert len(report.sentences(points)) == 4
    reported = report.document(points)
    assert len(reported["points"]) == 12
    assert {each["axis"] for each in reported["knees"]} == {"batch-size", "chunk-size"}
    report.write_csv(tmp_path / "s.csv", points)
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert len(rows) == 12
    assert float(rows[0]["tokens_per_second"]) > 0
    plot(points, tmp_path / "s.png", "title")
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_a_value_that_one_policy_lacks_is_a_gap():
    (table,) = report.tables([each for each in a_sweep() if each.trial.axis is Axis.BATCH][:-1], "title")
    assert list(table.columns[5].cells)[-1] == "-"


REPLICA = ideal(Replica(SHAPES["llama-3.1-8b"], H100))


def test_the_roofline_of_decoding_is_bandwidth_then_arithmetic():
    shape = Lengths(1.0, 1000.0)
    one, two, many = (tokens_per_second(REPLICA, shape, rows, 8192) for rows in (1, 2, 2000))
    assert one == pytest.approx(H100.bandwidth / 15.0e9, rel=0.05), "the weights are read once per token"
    assert two == pytest.approx(2 * one, rel=0.01)
    assert many < H100.bf16_flops / (2 * 7.5e9), "two operations per weight"


def test_a_chunk_bounds_how_many_rows_can_decode():
    shape = Lengths(300.0, 100.0)
    small, large = tokens_per_second(REPLICA, shape, 64, 64), tokens_per_second(REPLICA, shape, 64, 8192)
    assert small < large / 2
    assert tokens_per_second(REPLICA, shape, 64, 256) == pytest.approx(large, rel=0.05)


def test_an_ideal_device_loses_nothing():
    real = Replica(SHAPES["llama-3.1-8b"], replace(H100, step_overhead_seconds=1.0))
    shape = Lengths(100.0, 100.0)
    assert tokens_per_second(ideal(real), shape, 8, 8192) > 100 * tokens_per_second(real, shape, 8, 8192)


def test_lengths_are_means():
    assert lengths([Work("a", (1, 2), 4), Work("b", (1,) * 4, 8)]) == Lengths(3.0, 6.0)
