import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.response_cache.rules.warming import (
    DAY,
    HOUR,
    HYSTERESIS,
    Candidate,
    IdleDetector,
    choose,
    new_demand,
)

MIDNIGHT = 20_000 * DAY


def asked_at(times, first=None):
    demand = new_demand(times[0] if first is None else first)
    for time in times:
        demand = demand.asked(time)
    return demand


def daily(hour, days, per_day=1):
    return asked_at(
        [MIDNIGHT + day * DAY + (hour + n / 100) * HOUR for day in range(days) for n in range(per_day)]
    )


def test_what_comes_every_morning_is_expected_in_the_morning():
    demand = daily(hour=9, days=14, per_day=3)
    tomorrow = MIDNIGHT + 14 * DAY
    assert demand.expected(tomorrow + 8.5 * HOUR, 2 * HOUR) == pytest.approx(3, rel=0.05)
    assert demand.expected(tomorrow + 9 * HOUR, HOUR / 2) == pytest.approx(1.5, rel=0.05)
    assert demand.expected(tomorrow + 15 * HOUR, 2 * HOUR) < 0.1


def test_what_has_no_history_yet_is_judged_by_the_present():
    noon = MIDNIGHT + 12 * HOUR
    demand = asked_at([noon + 60 * n for n in range(60)])
    soon = demand.expected(noon + HOUR, HOUR)
    assert 15 < soon < 60
    assert demand.expected(noon + 9 * HOUR, HOUR) < soon / 10


def test_what_has_stopped_coming_fades():
    demand = daily(hour=9, days=14)
    nines = [MIDNIGHT + (14 + days) * DAY + 9 * HOUR for days in (0, 3, 10, 30)]
    expected = [demand.expected(at, HOUR) for at in nines]
    assert expected == sorted(expected, reverse=True)
    assert expected[-1] < 0.01


def test_a_clock_that_jumps_back_is_no_error():
    demand = asked_at([MIDNIGHT + DAY, MIDNIGHT])
    assert demand.times == 2
    assert demand.expected(MIDNIGHT - DAY, HOUR) >= 0


@given(
    st.lists(st.floats(0, 20 * DAY), min_size=1, max_size=60), st.floats(0, 30 * DAY), st.floats(1, 2 * DAY)
)
def test_expectations_are_finite_and_grow_with_the_window(times, now, seconds):
    demand = asked_at([MIDNIGHT + time for time in sorted(times)])
    less = demand.expected(MIDNIGHT + now, seconds / 2)
    more = demand.expected(MIDNIGHT + now, seconds)
    assert 0 <= less <= more + 1e-9
    assert more <= len(times) * (seconds / HOUR + 2)


def test_the_most_seconds_saved_come_first_within_the_budget():
    noon = MIDNIGHT + 12 * HOUR
    often = asked_at([noon + 10 * n for n in range(100)])
    once = asked_at([noon])
    now = noon + HOUR
    candidates = [
        Candidate(b"rare and slow", once, seconds=5.0, cost_seconds=4.0),
        Candidate(b"often and quick", often, seconds=1.0, cost_seconds=1.0),
        Candidate(b"often and slow", often, seconds=8.0, cost_seconds=6.0),
    ]
    everything = choose(candidates, now, HOUR, budget_seconds=100.0)
    assert [c.key for c in everything] == [b"often and slow", b"often and quick", b"rare and slow"]
    assert [c.key for c in choose(candidates, now, HOUR, budget_seconds=5.0)] == [
        b"often and quick",
        b"rare and slow",
    ]
    assert choose(candidates, now, HOUR, budget_seconds=0.5) == []


def test_what_hardly_anybody_will_ask_for_is_left():
    long_ago = asked_at([MIDNIGHT])
    assert choose([Candidate(b"old", long_ago, 100.0, 1.0)], MIDNIGHT + 40 * DAY, HOUR, 10.0) == []


def traffic(window, start, rate, seconds):
    """Evenly spaced arrivals; the time afterwards."""
    for n in range(int(rate * seconds)):
        window.arrived(start + n / rate)
    return start + seconds


def test_it_opens_when_the_rate_has_been_low_for_a_while():
    window = IdleDetector(below_rate=1.0, settle_seconds=5.0, now=0.0)
    assert not window.open(4.9)
    assert window.open(5.0)


def test_traffic_closes_it_at_once_and_it_settles_anew():
    window = IdleDetector(below_rate=0.5, settle_seconds=5.0, now=0.0)
    assert window.open(10.0)
    now = traffic(window, 10.0, rate=4.0, seconds=60.0)
    assert not window.open(now)
    low = next(now + n / 10 for n in range(1000) if window.rate(now + n / 10) <= 0.5)
    assert not window.open(low + 4.8)
    assert window.open(low + 5.0)


def test_between_the_two_set_points_it_stays_as_it_is():
    between = 0.5 * (1 + HYSTERESIS) / 2
    opened = IdleDetector(below_rate=0.5, settle_seconds=1.0, now=0.0)
    assert opened.open(1.0)
    now = traffic(opened, 1.0, rate=between, seconds=120.0)
    assert opened.open(now)
    shut = IdleDetector(below_rate=0.5, settle_seconds=1.0, now=0.0)
    now = traffic(shut, 0.0, rate=4.0, seconds=60.0)
    assert not shut.open(now)
    now = traffic(shut, now, rate=between, seconds=120.0)
    assert not shut.open(now)


def test_a_single_arrival_does_not_end_a_quiet_night():
    window = IdleDetector(below_rate=0.5, settle_seconds=1.0, now=0.0)
    assert window.open(100.0)
    window.arrived(100.0)
    assert window.open(100.0)
