from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stream import (
    PieceDetokenizer,
    Pieces,
    WindowDetokenizer,
    decoder_steps,
    has_pieces,
)
from tests.text.vocabularies import byte_fallback, byte_level, metaspace, word_piece

reproducible = settings(deadline=None, derandomize=True)

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BY_REGEX = {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([{"type": "ByteLevel"}], True),
        ([{"type": "Metaspace"}], True),
        ([REPLACE, FALLBACK, FUSE, STRIP], True),
        ([REPLACE, FALLBACK, FUSE], True),
        ([REPLACE, FUSE], True),
        ([], False),
        ([{"type": "WordPiece"}], False),
        ([BY_REGEX, FALLBACK, FUSE], False),
        ([REPLACE, FALLBACK, FUSE, {**STRIP, "stop": 1}], False),
        ([REPLACE, FALLBACK, FUSE, {**STRIP, "content": "x"}], False),
        ([REPLACE, STRIP, FUSE], False),
        ([FALLBACK, REPLACE, FUSE], False),
    ],
)
def test_which_decoders_work_piece_by_piece(steps: list[dict[str, Any]], expected: bool) -> None:
    assert has_pieces(steps) is expected


def test_the_families_served_work_piece_by_piece() -> None:
    assert all(has_pieces(decoder_steps(make())) for make in (byte_level, byte_fallback, metaspace))
    assert not has_pieces(decoder_steps(word_piece()))


def test_a_piece_is_text_if_it_is_whole_and_bytes_if_not() -> None:
    tokenizer = byte_level()
    pieces = Pieces(tokenizer, decoder_steps(tokenizer))
    assert pieces[tokenizer.backend.token_to_id("Ġthe")] == " the"
    assert pieces[tokenizer.backend.token_to_id("ð")] == b"\xf0"
    assert pieces[tokenizer.backend.token_to_id(" \u00a0plain — added")] == " \u00a0plain — added"
    assert pieces[10_000] == ""


@reproducible
@given(st.text(max_size=40))
def test_both_ways_give_the_same_text(text: str) -> None:
    tokenizer = byte_level()
    pieces = PieceDetokenizer(Pieces(tokenizer, decoder_steps(tokenizer)), frozenset())
    window = WindowDetokenizer(tokenizer, frozenset())
    tokens = tokenizer.encode(text)
    one = "".join(map(pieces.push, tokens)) + pieces.finish()
    other = "".join(map(window.push, tokens)) + window.finish()
    assert one == other


def test_a_window_stays_small() -> None:
    window = WindowDetokenizer(byte_level(), frozenset())
    broken = byte_level().backend.token_to_id("Ģ")
    for token in byte_level().encode("The quick brown 日本 fox ") * 5 + [broken] * 50:
        window.push(token)
        assert len(window._window) <= 8
