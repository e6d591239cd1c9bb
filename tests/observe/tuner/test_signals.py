import math

import pytest

from headrace.core.events import Arrived, Emitted, Finished
from headrace.core.request import FinishReason
from headrace.observe.tuner.signals import Shift, Side, Signals


def offer(signals, rate, began, ended, wait=0.1, tokens=99):
    """Requests at a steady rate: each waits ``wait`` of a second for its first token and ends after one."""
    count = int((ended - began) * rate)
    for i in range(count):
        at, name = began + i / rate, f"{began}-{i}"
        signals.fold(Arrived(name, tokens, "t", 0, at), at)
        signals.fold(Emitted(name, (1,)), at + wait)
        signals.fold(Finished(name, FinishReason.LENGTH, tokens, 2, 0), at + 1.0)
    return signals


def test_the_load_is_smoothed_and_unknown_at_first():
    signals = offer(Signals(10.0), 2.0, 0.0, 20.0)
    assert signals.load(20.0) == 0.0
    offer(signals, 2.0, 20.0, 100.0)
    assert signals.load(100.0) == pytest.approx(200, rel=0.1), "tokens and requests per second"
    before = signals.load(100.0)
    offer(signals, 20.0, 100.0, 101.0)
    assert signals.load(101.0) < 2 * before, "a burst of a second is hardly seen"
    assert signals.load(150.0) < 0.1 * before


def test_the_side_changes_with_hysteresis():
    signals = offer(Signals(5.0), 2.0, 0.0, 50.0, wait=0.1)
    assert signals.side is Side.STEPS
    offer(signals, 2.0, 50.0, 100.0, wait=0.4)
    assert signals.side is Side.STEPS, "40 % is between the bounds"
    offer(signals, 2.0, 100.0, 150.0, wait=0.8)
    assert signals.side is Side.WAITING
    offer(signals, 2.0, 150.0, 200.0, wait=0.4)
    assert signals.side is Side.WAITING
    offer(signals, 2.0, 200.0, 250.0, wait=0.1)
    assert signals.side is Side.STEPS


def test_requests_without_a_token_do_not_count():
    signals = Signals(5.0)
    signals.fold(Arrived("a", 10, "t", 0, 0.0), 0.0)
    signals.fold(Finished("a", FinishReason.REJECTED, 10, 0, 0), 3.0)
    assert math.isnan(signals.waiting)


def test_a_load_shifts_when_it_leaves_a_band_and_not_too_often():
    shift = Shift(60.0)
    assert not shift.happened(0.0, 0.0), "unknown"
    assert not shift.happened(100.0, 10.0), "the first load is no shift"
    assert not shift.happened(150.0, 200.0)
    assert not shift.happened(70.0, 300.0)
    assert shift.happened(200.0, 400.0)
    assert not shift.happened(50.0, 430.0), "too soon"
    assert shift.happened(50.0, 470.0)
