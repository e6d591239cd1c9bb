import math
import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.request import FinishReason
from headrace.response_cache.rules.response.entry import (
    JITTER,
    SKEW_SECONDS,
    Entry,
    Freshness,
    freshness,
    lifetime,
)

ENTRY = Entry((1,), FinishReason.STOP, 1, seconds=2.0, created=100.0, expires=200.0, stale_until=250.0)


def test_an_entry_lives_fresh_then_stale_then_not_at_all():
    assert freshness(ENTRY, 100.0, 0.0) is Freshness.FRESH
    assert freshness(ENTRY, 199.9, 0.0) is Freshness.FRESH
    assert freshness(ENTRY, 200.0, 0.0) is Freshness.STALE
    assert freshness(ENTRY, 249.9, 0.0) is Freshness.STALE
    assert freshness(ENTRY, 250.0, 0.0) is Freshness.GONE


def test_an_entry_older_than_max_age_is_not_served():
    assert freshness(ENTRY, 150.0, 0.0, max_age=50.0) is Freshness.FRESH
    assert freshness(ENTRY, 150.0, 0.0, max_age=49.0) is Freshness.GONE
    assert freshness(ENTRY, 220.0, 0.0, max_age=49.0) is Freshness.GONE


def test_an_entry_from_the_future_is_not_trusted():
    assert freshness(ENTRY, 100.0 - SKEW_SECONDS, 0.0) is Freshness.FRESH
    assert freshness(ENTRY, 99.0 - SKEW_SECONDS, 0.0) is Freshness.GONE


def test_what_took_long_is_renewed_early_and_seldom_too_early():
    draw = random.Random(0)

    def share(now, seconds):
        entry = Entry((1,), FinishReason.STOP, 1, seconds, 100.0, 200.0, 250.0)
        states = [freshness(entry, now, -math.log(1 - draw.random())) for _ in range(4000)]
        return states.count(Freshness.REFRESH) / 4000

    assert share(198.0, 2.0) > share(196.0, 2.0) > share(190.0, 2.0)
    assert abs(share(198.0, 2.0) - math.exp(-1)) < 0.03  # -ln(u) >= (end - now) / seconds
    assert share(198.0, 0.1) == 0.0


@given(st.floats(1.0, 1e7), st.binary(min_size=32, max_size=32))
def test_a_life_is_never_longer_than_asked_for_and_not_much_shorter(ttl, key):
    assert (1 - JITTER) * ttl <= lifetime(ttl, key) <= ttl
    assert lifetime(ttl, key) == lifetime(ttl, key)


def test_lives_that_began_together_do_not_end_together():
    ends = {lifetime(3600.0, bytes([i]) * 32) for i in range(256)}
    assert len(ends) == 256
