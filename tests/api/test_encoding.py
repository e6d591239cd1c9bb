"""JSON of answers: exact, and never written in one long call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api import encoding
from headrace.api.encoding import PIECE_VALUES, encode, encode_lines, encode_text, pieces, written


def values_of(value: Any) -> int:
    """The values in ``value``, keys included; a text counts by its length."""
    if isinstance(value, str):
        return 1 + len(value) // encoding.VALUE_CHARACTERS
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values_of, value.values()))
    return 1 + sum(map(values_of, value)) if isinstance(value, (list, tuple)) else 1


ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97, 98]}
LONG = [
    {"content": [ENTRY | {"top_logprobs": [ENTRY] * 20} for _ in range(300)], "refusal": None},
    [{"index": index, "logprobs": {"content": [ENTRY] * 2_000}} for index in range(16)],
    {"prompt_logprobs": [None, *({str(at): ENTRY for at in range(21)} for _ in range(500))]},
    {"token_ids": tuple(range(100_000)), "none": [], "empty": {}},
    [0] * 50 + [[1] * 20_000] + [0] * 50,
    {"text": 'é"\\\u2028\U0001f600' * 200_000},
    [["x" * 200_000] * 3, {"a": "y" * 600_000}],
    [[]] * 10_000,
]


@pytest.mark.parametrize("value", LONG)
def test_no_call_of_the_encoder_writes_many_values(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(part: Any) -> str:
        calls.append(values_of(part))
        return encode(part)

    monkeypatch.setattr(encoding, "encode", counted)
    assert written(value) == encode(value).encode()
    assert max(calls) <= PIECE_VALUES
    assert len(calls) < 8 + 8 * values_of(value) / PIECE_VALUES + 3 * 500  # few of them are short


@pytest.mark.parametrize("value", [None, 1.5, "a", [], {}, [1, {"a": [None, True]}], "é\u2028"])
def test_what_is_short_is_written_in_one_call(value: Any) -> None:
    assert list(pieces(value)) == [encode(value)]


def test_lines_have_no_line_breaks() -> None:
    value = {"a\u2028": ["b\x85"] * 10_000}
    shown = encode_lines(value)
    assert json.loads(shown) == value
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    "text", ['plain "quoted" \\ text', "a\nb\r\tc\x00\x1f", "naïve 日本 😀", "a\u2028b\u2029c\x85d é"]
)
def test_text_survives_and_stays_on_its_line(text):
    shown = encode_text(text)
    assert json.loads(shown) == text
    assert len(shown.splitlines()) == 1


def test_text_is_not_escaped_without_need():
    assert encode_text("日本") == '"日本"'


def test_what_json_cannot_say_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        encode({"x": float("nan")})
