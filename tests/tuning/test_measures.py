import pytest

from headrace.core.events import Arrived, Emitted, Finished, Preempted, PreemptReason
from headrace.core.request import FinishReason
from headrace.tuning.measures import METRICS, WindowMeter


def finished(request_id, reason=FinishReason.STOP, output=2):
    return Finished(request_id, reason, 10, output, 0)


def test_what_happens_in_a_window_counts_whenever_its_request_arrived():
    meter = WindowMeter()
    meter.fold(Arrived("early", 10, "t", 0), 0.0)
    meter.fold(Emitted("early", (1,)), 0.5)  # before the window: not counted
    meter.open(1.0)
    meter.fold(Emitted("early", (2,)), 1.5)  # a gap of one second
    meter.fold(Arrived("late", 20, "t", 0, at=1.75), 2.0)
    meter.fold(Emitted("late", (1, 2)), 2.25)  # a first token after half a second
    meter.fold(finished("early"), 2.5)
    meter.fold(Preempted("late", PreemptReason.OWED, 1), 2.75)
    values, load = meter.close(3.0)
    assert values["output_tokens_per_second"] == pytest.approx(1.5)
    assert values["ttft_mean_seconds"] == pytest.approx(0.5)
    assert values["itl_mean_seconds"] == pytest.approx(1.0)
    assert values["e2e_mean_seconds"] == pytest.approx(2.5)
    assert values["normalized_latency_seconds"] == pytest.approx(1.25)
    assert values["open_seconds_per_token"] == pytest.approx((1.5 + 1.0) / 3)
    assert values["requests_per_second"] == pytest.approx(0.5)
    assert values["failed_share"] == 0.0
    assert values["preemptions_per_request"] == 1.0
    assert load == pytest.approx((20 + 1) / 2)
    assert set(values) == set(METRICS)


def test_a_metric_without_a_value_is_absent():
    meter = WindowMeter()
    meter.open(0.0)
    values, load = meter.close(1.0)
    assert values == {"output_tokens_per_second": 0.0, "requests_per_second": 0.0}
    assert load == 0.0


def test_failures_are_counted_and_cancelled_requests_are_none():
    meter = WindowMeter()
    meter.open(0.0)
    for number, reason in enumerate((FinishReason.FAILED, FinishReason.CANCELLED, FinishReason.LENGTH)):
        meter.fold(Arrived(str(number), 1, "t", 0), 0.0)
        meter.fold(finished(str(number), reason), 0.5)
    values, _ = meter.close(1.0)
    assert values["failed_share"] == pytest.approx(1 / 3)
    assert values["requests_per_second"] == 1.0


def test_nothing_is_remembered_of_requests_that_ended():
    meter = WindowMeter()
    for number in range(100):
        meter.fold(Arrived(str(number), 1, "t", 0), 0.0)
        meter.fold(finished(str(number)), 0.5)
    assert not meter._live
    meter.fold(Emitted("unknown", (1,)), 1.0)
