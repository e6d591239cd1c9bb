"""Who got what he hoped for, on event lists made by hand."""

from __future__ import annotations

import pytest

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    Event,
    Finished,
    Preempted,
    PreemptReason,
    Stepped,
    TurnedAway,
)
from headrace.core.request import NO_SLO, FinishReason, RejectReason, Slo
from headrace.observe.goodput import FairnessWindow, Goodput
from headrace.observe.metrics_page import MetricsPage
from tests.observe.test_metrics import page

SLO = Slo(1.0, 0.5)
STEP = Stepped(1, 0, 1, 10, 0, 0, 0, 10, 0, 0)


def arrived(name: str = "a", slo: Slo = SLO, tenant: str = "acme", of: str = "priority") -> Arrived:
    return Arrived(name, 40, tenant, 0, service_class=of, slo=slo)


def reported(*story: tuple[float, Event]) -> dict[str, float]:
    sheet = MetricsPage()
    fold = Goodput(sheet)
    for now, event in story:
        fold.fold(event, now)
    return {name.removeprefix("headrace:"): value for name, value in page(sheet).items()}


def verdicts(*story: tuple[float, Event]) -> dict[str, str]:
    samples = reported(*story)
    return {
        name.partition("slo=")[2].rstrip("}"): name.partition("_total")[0]
        for name in samples
        if name.startswith("slo_")
    }


def answer(first: float, last: float, reason: FinishReason = FinishReason.STOP) -> list[tuple[float, Event]]:
    return [
        (0.0, arrived()),
        (0.1, Admitted("a", AdmitReason.NEW, 0, 40)),
        (first, Emitted("a", (1,))),
        (last, Emitted("a", (2, 3))),
        (last, Finished("a", reason, 40, 3, 0)),
    ]


KEPT, MISSED = "slo_attained", "slo_missed"


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1.0, 2.0, {"ttft": KEPT, "tpot": KEPT, "all": KEPT}),
        (1.1, 2.1, {"ttft": MISSED, "tpot": KEPT, "all": MISSED}),
        (1.0, 2.1, {"ttft": KEPT, "tpot": MISSED, "all": MISSED}),
    ],
)
def test_bounds_are_judged_one_by_one_and_together(first: float, last: float, expected: dict) -> None:
    assert verdicts(*answer(first, last)) == expected


def test_what_the_server_ended_is_missed() -> None:
    for reason in (FinishReason.TIMEOUT, FinishReason.FAILED, FinishReason.REJECTED):
        story = [(0.0, arrived()), (0.1, Finished("a", reason, 40, 0, 0))]
        assert verdicts(*story) == {"ttft": MISSED, "tpot": MISSED, "all": MISSED}


def test_what_its_caller_gave_up_is_judged_by_what_was_due() -> None:
    gone = Finished("a", FinishReason.CANCELLED, 40, 0, 0)
    assert verdicts((0.0, arrived()), (0.5, gone)) == {}
    assert verdicts((0.0, arrived()), (1.5, gone)) == {"ttft": MISSED, "all": MISSED}
    assert verdicts(*answer(1.0, 1.5, FinishReason.CANCELLED)) == {"ttft": KEPT}


def test_without_targets_goodput_is_unset() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.FAILED, FinishReason.CANCELLED):
        story = [(0.0, arrived(slo=NO_SLO)), (99.0, Finished("a", reason, 40, 0, 0))]
        assert verdicts(*story) == {}
        assert not any(name.startswith("goodput_share") for name in reported(*story))
    fold = Goodput(MetricsPage())
    for now, event in story:
        fold.fold(event, now)
    (found,) = fold.classes()
    assert (found.goodput, found.met, found.missed) == (None, 0, 0)


def test_the_share_is_of_late() -> None:
    missed = [(0.0, arrived()), (0.1, Finished("a", FinishReason.FAILED, 40, 0, 0))]
    later = [(at + 600.0, event) for at, event in answer(1.0, 2.0)]
    assert reported(*missed)["goodput_share{class=priority}"] == 0.0
    assert reported(*missed, *answer(1.0, 2.0))["goodput_share{class=priority}"] == pytest.approx(
        0.5, abs=0.02
    )
    assert reported(*missed, *later)["goodput_share{class=priority}"] > 0.999


def test_a_refusal_at_the_gate_counts_against_its_class() -> None:
    away = TurnedAway("x", "acme", "flex", RejectReason.QUEUE_FULL, SLO)
    samples = reported((0.0, away), (0.0, Finished("x", FinishReason.REJECTED, 5, 0, 0)))
    assert samples["requests_turned_away_total{class=flex,reason=queue_full}"] == 1
    assert samples["slo_missed_total{class=flex,slo=all}"] == 1
    assert samples["goodput_share{class=flex}"] == 0.0


def test_a_refusal_without_targets_is_counted_and_no_goodput() -> None:
    samples = reported((0.0, TurnedAway("x", "acme", "flex", RejectReason.QUEUE_FULL)))
    assert samples["requests_turned_away_total{class=flex,reason=queue_full}"] == 1
    assert not any(name.startswith(("slo_", "goodput")) for name in samples)


def test_classes_have_gauges_and_queue_times() -> None:
    story: list[tuple[float, Event]] = [
        (0.0, arrived("a")),
        (0.0, arrived("b", of="flex")),
        (0.5, Admitted("a", AdmitReason.NEW, 0, 40)),
        (0.5, Admitted("b", AdmitReason.NEW, 0, 40)),
        (1.0, Preempted("b", PreemptReason.NO_BLOCKS, 40)),
    ]
    samples = reported(*story)
    assert samples["class_requests_running{class=priority}"] == 1
    assert samples["class_requests_waiting{class=flex}"] == 1
    assert samples["class_requests_running{class=flex}"] == 0
    assert samples["class_queue_time_seconds_sum{class=flex}"] == 0.5
    ends = [(2.0, Finished(name, FinishReason.CANCELLED, 40, 0, 0)) for name in ("a", "b")]
    samples = reported(*story, *ends)
    assert not any(value for name, value in samples.items() if name.startswith("class_requests"))


def served(shares: dict[str, int]) -> float:
    """The index after ten seconds in which both tenants always have something waiting."""
    story: list[tuple[float, Event]] = []
    for tenant in shares:
        story += [(0.0, arrived(f"{tenant}{i}", tenant=tenant)) for i in range(100)]
        story += [(0.0, Admitted(f"{tenant}0", AdmitReason.NEW, 0, 40))]
    for second in range(10):
        for tenant, tokens in shares.items():
            story.append((second + 0.5, Chunked(f"{tenant}0", 0, tokens, ChunkReason.WHOLE)))
        story.append((second + 1.5, STEP))
    return reported(*story)["tenant_fairness_jain"]


def test_the_index_of_tenants() -> None:
    assert reported((0.0, STEP))["tenant_fairness_jain"] == 1.0
    assert served({"a": 100, "b": 100}) == pytest.approx(1.0)
    assert served({"a": 190, "b": 10}) == pytest.approx(1 / (1 + 0.9**2), abs=0.01)


def test_a_tenant_that_asks_for_little_and_gets_it_is_served_fairly() -> None:
    window = FairnessWindow()
    window.wait("flood", 1e6, 0.0)
    for second in range(10):
        window.serve("light", 10.0, second + 0.1)
        window.serve("flood", 90.0, second + 0.2)
    window.close()
    assert window.index() == pytest.approx(1.0)


def test_a_tenant_that_is_held_back_by_another_is_not() -> None:
    window = FairnessWindow()
    window.wait("flood", 1e6, 0.0)
    window.wait("light", 1e6, 0.0)
    for second in range(10):
        window.serve("flood", 99.0, second + 0.1)
        window.serve("light", 1.0, second + 0.2)
    window.close()
    assert window.index() == pytest.approx(0.51, abs=0.01)


def test_weights_are_shares() -> None:
    weights = {"gold": 3.0, "iron": 1.0}
    window = FairnessWindow(weights.__getitem__)
    for tenant in weights:
        window.wait(tenant, 1e6, 0.0)
    for second in range(4):
        window.serve("gold", 75.0, second)
        window.serve("iron", 25.0, second)
    window.close()
    assert window.index() == pytest.approx(1.0)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = FairnessWindow(slices=2)
    window.wait("a", 1e6, 0.0)
    window.wait("b", 1e6, 0.0)
    window.serve("a", 100.0, 0.5)
    window.close()
    assert window.index() == pytest.approx(0.5)
    for second in (1, 2, 3):
        window.serve("a", 50.0, second)
        window.serve("b", 50.0, second)
    assert window.index() == pytest.approx(1.0)


def test_a_tenant_without_waiting_requests_is_dropped() -> None:
    """Work is a fraction where answers are foretold by a mean: added and taken away again it must be nothing."""
    window = FairnessWindow()
    for tokens in (0.1, 0.2, 0.3):
        window.wait("a", tokens, 0.0)
    for tokens in (0.1, 0.2, 0.3):
        window.wait("a", -tokens, 0.0)
    assert not window._waiting


def test_nothing_is_fair() -> None:
    window = FairnessWindow()
    assert window.index() == 1.0
    window.wait("a", 10.0, 0.0)
    window.wait("a", -10.0, 5.0)
    assert window.index() == 1.0
