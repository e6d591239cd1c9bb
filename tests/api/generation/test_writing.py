import json

import pytest

from headrace.api.replies import DONE, encode, encode_text, error_event


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


def test_an_error_event_ends_its_stream():
    assert error_event(b'{"error": 1}') == b'data: {"error": 1}\n\n' + DONE
