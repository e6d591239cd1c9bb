"""Two prompts with equal text and different images share nothing behind the first position of an image."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block_keys import chained_key, chained_keys, root_key
from headrace.core.capacity import WindowGroups
from headrace.core.events import Admitted, Chunked
from headrace.core.images import ImageSpan, contents, encoded, unsplit
from headrace.core.knobs import Knobs
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


@settings(max_examples=60, derandomize=True)
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


@pytest.mark.parametrize(
    ("start", "length", "most", "expected"),
    [
        (0, 10, 0, 10),  # ends where they begin
        (0, 11, 99, 10),
        (0, 15, 99, 10),
        (0, 16, 0, 16),
        (10, 3, 6, 6),
        (10, 3, 5, 0),
        (12, 1, 4, 4),
        (12, 1, 3, 0),
        (0, 25, 99, 24),
        (16, 4, 0, 4),
    ],
)
def test_joint_positions_are_not_split(start, length, most, expected):
    images = (span(8, 10)._replace(joint=(2, 8)), span(20, 9)._replace(joint=(4, 9)), span(40, 9))
    assert unsplit(images, start, length, most) == expected


@given(
    starts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 14)), min_size=1, max_size=3),
    budget=st.integers(8, 20),
    blocks=st.integers(0, 30),
    window=st.sampled_from([0, 5]),
    cached=st.booleans(),
)
@settings(max_examples=80)
def test_no_chunk_ends_within_joint_positions(starts, budget, blocks, window, cached):
    """Whatever the budget and the memory are, all prompts end, each with the output of its own images."""
    images, tokens = [], []
    for number, (text, length) in enumerate(starts):
        tokens += range(10, 11 + text)
        images.append(
            ImageSpan(len(tokens), length, hashlib.sha256(b"%d" % number).digest(), number, (0, length))
        )
        tokens += (90,) * length
    tokens.append(7)
    windows = WindowGroups(1, window, max(budget, 14)) if window else WindowGroups(0, 0, 0)
    needed = 4 * (max(len(tokens), 30) // 4 + 3)  # for the longest prompt, which may be the text
    engine, _ = hashing_engine(
        num_blocks=needed + blocks,
        knobs=Knobs(batched_tokens=budget),
        prefix_caching=cached,
        windows=windows,
        max_num_seqs=4,
    )
    record = Record()
    params = SamplingParams(temperature=0.0, max_tokens=5)
    requests = [Request(f"r{number}", tuple(tokens), params, images=tuple(images)) for number in range(3)]
    requests.append(Request("text", tuple(range(10, 40)), params))
    for request in requests:
        engine.submit(request, 0.0)
    drain(engine, record)
    engine.check_consistency()
    for request in requests:
        prompt = seen(request.tokens, request.images)
        assert record.tokens[request.id] == expected_tokens(prompt, 0, 5, frozenset(), windows=windows)
    for event in record.of(Chunked):
        if event.request_id != "text":
            end = event.start + event.length
            assert not any(each.start < end < each.end for each in images)
