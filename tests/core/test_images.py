"""Two prompts with equal text and different images share nothing behind the first position of an image."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block_keys import chained_key, chained_keys, root_key
from headrace.core.events import Admitted
from headrace.core.images import ImageSpan, contents, encoded
from headrace.core.request import Request, SamplingParams
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import expected_tokens, seen

ONE, OTHER = (hashlib.sha256(name).digest() for name in (b"one", b"other"))
ROOT = root_key("", "")


def span(start: int, length: int, digest: bytes = ONE) -> ImageSpan:
    return ImageSpan(start, length, digest, digest[0])


def test_without_images_contents_are_the_tokens():
    tokens = (5, 6, 7)
    assert contents(tokens, ()) is tokens


def test_recorded_keys_do_not_change():
    """Blocks on disks and keys of peers were made with these numbers."""
    tokens = list(range(7, 7 + 40))
    first = hashlib.sha256(ROOT + array("q", tokens[:16]).tobytes()).digest()
    second = hashlib.sha256(first + array("q", tokens[16:32]).tobytes()).digest()
    assert chained_keys(ROOT, tokens, 16) == [first, second]
    assert ROOT.hex() == "374708fff7719dd5979ec875d56cd2286f6d3cf7ec317a3b25632aab28ec37bb"


def test_a_block_before_or_between_images_has_the_key_of_its_text():
    tokens = [90] * 16
    plain = chained_keys(ROOT, tokens, 4)
    shown = chained_keys(ROOT, contents(tokens, (span(6, 2),)), 4)
    assert shown[0] == plain[0]
    assert shown[1] != plain[1]
    assert chained_key(shown[1], tokens[8:12]) == shown[2]


def test_every_bit_of_a_digest_and_every_offset_is_in_the_key():
    keys = set()
    for bit in range(256):
        digest = (1 << bit).to_bytes(32, "little")
        keys.add(chained_key(ROOT, contents([90] * 4, (span(3, 1, digest),))))
    for offset in range(32):
        keys.add(chained_key(ROOT, span(0, 64).contents()[offset : offset + 4]))
    assert len(keys) == 256 + 32


@pytest.mark.parametrize(
    "spans",
    [
        (span(2, 3), span(4, 2)),
        (span(6, 2), span(2, 2)),
        (span(6, 3),),
        (span(2, 0),),
        (span(-1, 2),),
        (span(1, 1, b"short"),),
    ],
    ids=["overlap", "order", "behind the end", "empty", "before the beginning", "digest"],
)
def test_spans_outside_of_a_prompt_are_refused(spans):
    with pytest.raises(ValueError, match="an image at"):
        contents([90] * 8, spans)


blocks = st.lists(
    st.one_of(
        st.integers(0, 99),
        st.builds(
            lambda at, d: span(0, 9, d).contents()[at], st.integers(0, 8), st.sampled_from([ONE, OTHER])
        ),
    ),
    min_size=6,
    max_size=6,
)


@given(blocks, blocks)
def test_equal_bytes_are_equal_contents(one, other):
    assert (encoded(one) == encoded(other)) == (one == other)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    block_size=st.sampled_from([1, 2, 4, 8]),
    start=st.integers(0, 20),
    length=st.integers(1, 12),
    tail=st.integers(1, 12),
    caches=st.booleans(),
)
def test_different_images_share_no_block_behind_their_first_position(block_size, start, length, tail, caches):
    """The second prompt finds at most the text before its image, and each has the output of its own image."""
    tokens = tuple(range(10, 10 + start)) + (90,) * length + tuple(range(50, 50 + tail))
    engine, _ = hashing_engine(num_blocks=512, block_size=block_size, prefix_caching=caches)
    record, requests = Record(), {}
    for name, images in (
        ("one", (span(start, length),)),
        ("other", (span(start, length, OTHER),)),
        ("none", ()),
        ("later", (span(start, length - 1),) if length > 1 else (span(start, 1, bytes(32)),)),
        ("again", (span(start, length),)),
    ):
        requests[name] = Request(name, tokens, SamplingParams(temperature=0.0, max_tokens=5), images=images)
        engine.submit(requests[name], 0.0)
        drain(engine, record)
        engine.check_consistency()
    cached = {event.request_id: event.cached_tokens for event in record.of(Admitted)}
    keys = {
        name: set(chained_keys(ROOT, contents(tokens, each.images), block_size))
        for name, each in requests.items()
    }
    assert len(keys["one"] & keys["other"]) == len(keys["one"] & keys["none"]) == start // block_size
    assert keys["one"] == keys["again"]
    for name, request in requests.items():
        prompt = seen(tokens, request.images)
        assert record.tokens[name] == expected_tokens(prompt, 0, 5, frozenset()), name
    if caches:
        assert cached["other"] <= start
        assert cached["none"] <= start
        assert cached["again"] == len(tokens) - 1
