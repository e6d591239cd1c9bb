from __future__ import annotations

import pytest

from headrace.core.tenancy.gate import Limits
from headrace.lab.plots import plot_outcomes
from headrace.lab.simulate.runner import from_work
from headrace.lab.simulate.tally import outcome
from headrace.lab.workload.work import Call, Work
from headrace.plots import NoPlots
from tests.lab.simulate.scenes import Fixed, fleet, run


def test_figures_by_hand():
    # Steps of a second: the first request runs alone, then both, then the second alone.
    tally = run(fleet(Fixed(1.0)), [Call(0.0, 4, 3, "a"), Call(0.5, 8, 3, "b")])
    reported = outcome(tally, {"ttft": 1.2, "tpot": 1.0}, busy_seconds=[4.0])
    assert (reported.summary.requests, reported.summary.failed, reported.summary.seconds) == (2, 0, 4.0)
    assert reported.summary.output_tokens_per_second == pytest.approx(6 / 4)
    assert (reported.summary.ttft.p50, reported.summary.ttft.most) == (1.25, 1.5)
    assert reported.summary.tpot.mean == 1.0
    assert reported.summary.itl.p99 == pytest.approx(1.0, rel=0.01)
    assert reported.summary.goodput == pytest.approx(1 / 4), "the second came too late"
    assert reported.summary.slo_share == 0.5
    assert [(part.name, part.slo_share) for part in reported.tenants] == [("a", 1.0), ("b", 0.0)]
    assert [(part.name, part.slo_share) for part in reported.classes] == [("default", 0.5)]
    assert reported.facts["steps"] == 4
    assert reported.facts["batch_rows_mean"] == 6 / 4
    assert reported.facts["device_busy_percent"] == 100.0
    assert reported.facts["jain_service"] == pytest.approx((10 + 14) ** 2 / (2 * (10**2 + 14**2)))


def test_requests_without_an_answer_meet_no_bound():
    tally = run(
        fleet(Fixed(1.0), max_num_seqs=1, limits=Limits(1, 1000)), [Call(0.0, 4, 2), Call(0.1, 4, 2, "b")]
    )
    reported = outcome(tally, {"e2e": 9.0})
    assert reported.failures == {"queue_full": 1}
    assert [part.slo_share for part in reported.tenants] == [0.0, 1.0]
    assert reported.summary.failed == 1


def test_fairness_is_judged_while_tenants_wait():
    calls = [Call(0.0, 8, 20, "ab"[i % 2]) for i in range(40)]
    reported = outcome(run(fleet(Fixed(0.5), max_num_seqs=4), calls), {})
    line = reported.timeline
    assert reported.facts["jain_backlogged"] > 0.9
    assert len(line["seconds"]) == len(line["jain"]) == len(line["running"])
    assert max(line["running"]) == pytest.approx(4.0)
    assert line["waiting"][1] > line["waiting"][-1]


def test_nothing_at_all_has_figures_too():
    reported = outcome(run(fleet(Fixed()), []), {"ttft": 1.0})
    assert (reported.summary.requests, reported.summary.seconds, reported.summary.goodput) == (0, 0.0, 0.0)


def test_work_can_be_simulated_as_it_is():
    live = fleet(Fixed(1.0))
    live.run(from_work([Work("w0", (1, 2, 3), 4, 0.0), Work("w1", (1, 2, 3), 2, 10.0)]))
    assert outcome(live.tally, {}).summary.output_tokens == 6
    with pytest.raises(ValueError, match="w0: only prompts of token ids"):
        live.run(from_work([Work("w0", "text", 4)]))


def test_what_warms_up_does_not_count():
    work = [Work(f"w{i}", (i, 2, 3, 4, 5, 6, 7, 8), 4, 0.5 * i) for i in range(6)]
    cold = fleet(Fixed(0.25))
    cold.run(from_work(work))
    warm = fleet(Fixed(0.25))
    warm.warm_up(from_work(work))
    assert warm.now == cold.tally.ended
    warm.run(from_work(work, warm.now))
    assert outcome(warm.tally, {}).summary == outcome(cold.tally, {}).summary
    assert warm.replicas[0].runner.busy_seconds == cold.replicas[0].runner.busy_seconds


def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    calls = [Call(0.0, 8, 20, "ab"[i % 2]) for i in range(40)]
    reported = outcome(run(fleet(Fixed(0.5), max_num_seqs=4), calls), {"ttft": 1.0})
    written = plot_outcomes({"fair": reported, "fcfs": reported}, tmp_path / "plots", "a title")
    assert [path.name for path in written] == ["timeline.png", "latency.png", "fairness.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(NoPlots, match="pip install"):
        plot_outcomes(outcome(run(fleet(Fixed()), []), {}), tmp_path, "t")
