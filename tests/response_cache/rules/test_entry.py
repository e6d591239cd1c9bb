import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason
from headrace.response_cache.rules.entry import (
    JITTER,
    SKEW_SECONDS,
    Damaged,
    Entry,
    Freshness,
    Pulse,
    Seal,
    freshness,
    lifetime,
    pack,
    unpack,
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


KEY = bytes(range(32))
TOKEN = st.integers(0, 2**32 - 1)
LOGPROB = st.floats(allow_nan=False, max_value=0)
SCORES = st.builds(
    TokenLogprob,
    TOKEN,
    LOGPROB,
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(TOKEN, LOGPROB), max_size=3).map(tuple),
)
TIMES = st.floats(0, 1e12)
ENTRIES = st.builds(
    Entry,
    tokens=st.lists(TOKEN, max_size=20).map(tuple),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    prompt_tokens=TOKEN,
    seconds=TIMES,
    created=TIMES,
    expires=TIMES,
    stale_until=TIMES,
    logprobs=st.lists(SCORES, max_size=4).map(tuple),
    stop_token=st.none() | TOKEN,
    pulses=st.lists(st.builds(Pulse, st.floats(0, 1e6, width=32), TOKEN), max_size=4).map(tuple),
    versions=st.lists(st.tuples(st.text(max_size=9), st.integers(0, 2**64 - 1)), max_size=4).map(tuple),
    barred=st.booleans(),
)


@given(ENTRIES)
def test_what_is_packed_is_unpacked(entry):
    assert unpack(KEY, pack(KEY, entry)) == entry


def test_minus_infinity_is_a_log_probability():
    score = TokenLogprob(3, -math.inf, 9, ((4, -math.inf),))
    entry = Entry((3,), FinishReason.STOP, 1, 0.0, 0.0, 1.0, 1.0, logprobs=(score,))
    assert unpack(KEY, pack(KEY, entry)).logprobs == (score,)


@given(ENTRIES, st.data())
def test_no_changed_or_cut_value_is_believed(entry, data):
    value = pack(KEY, entry)
    at = data.draw(st.integers(0, len(value) - 1))
    other = value[at] ^ data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        unpack(KEY, value[:at] + bytes([other]) + value[at + 1 :])
    with pytest.raises(Damaged):
        unpack(KEY, value[:at])


@given(ENTRIES)
def test_the_entry_of_another_key_is_not_believed(entry):
    with pytest.raises(Damaged, match="another key"):
        unpack(KEY, pack(KEY[::-1], entry))


@given(st.binary(max_size=300))
def test_noise_is_no_entry(noise):
    with pytest.raises(Damaged):
        unpack(KEY, noise)
    with pytest.raises(Damaged):
        Seal(b"secret").open(KEY, noise)


def test_a_sealed_value_opens_with_its_key_and_secret_alone():
    seal = Seal(b"secret")
    sealed = seal.close(KEY, b"value")
    assert seal.open(KEY, sealed) == b"value"
    for other, key, value in (
        (Seal(b"other"), KEY, sealed),
        (seal, KEY[::-1], sealed),
        (seal, KEY, sealed[:-1]),
        (seal, KEY, b"\0" * 32 + b"value"),
    ):
        with pytest.raises(Damaged):
            other.open(key, value)
