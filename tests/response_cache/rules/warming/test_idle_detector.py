from headrace.response_cache.rules.warming.idle_detector import HYSTERESIS, IdleDetector


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
