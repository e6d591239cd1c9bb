import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason
from headrace.response_cache.rules.response.codec import Damaged, Seal, pack, unpack
from headrace.response_cache.rules.response.entry import Entry, Pulse

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
