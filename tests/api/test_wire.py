"""Bodies are strict, and errors name the client's fields."""

from __future__ import annotations

import json
import re
import threading

import pytest

from headrace.api import body as reading
from headrace.api.anthropic.routes import NAMES
from headrace.api.body import MESSAGE, parse, refuse_unsupported, valid
from headrace.api.compile.bodies import CHAT, COMPLETIONS, TOKENIZE, ChatBody, CompletionBody, Message
from headrace.api.compile.fields import StreamOptions
from headrace.api.errors import ApiError, invalid
from headrace.api.openai.routes import TokenizeBody, TokenizeChatBody
from headrace.api.wire import Replayed, Wire, named
from headrace.core.request import InvalidParameter
from tests.api.bodies import FORMS, LARGE, broken, example


class Body(Wire):
    """A body with one of each."""

    count: int
    share: float | None = None
    name: str | None = None
    ids: list[int] | None = None
    options: StreamOptions | None = None


BROKEN = [
    *(b"", b"{", b"[]", b"null", b"3", b"\xef\xbb\xbf{}", b"[" * 5000, b'{"count":' * 5000),
    *(b'{"count": NaN}', b'{"count": 1, "share": Infinity}', b'{"count": 1,}'),
    *(b'{"count": 1, "name": "\xff"}', b'{"count": 1, "name": "\\ud800"}'),
]


def refusal(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(raw, Body, {"later": (0,)})
    assert error.value.status == 400
    return error.value


def test_a_good_body_is_typed():
    body = parse(b'{"count": 3, "share": 1, "ids": [1, 2], "options": {"include_usage": true}}', Body, {})
    assert (body.count, body.share, body.ids) == (3, 1.0, [1, 2])
    assert body.options is not None
    assert body.options.include_usage


@pytest.mark.parametrize(
    "raw",
    BROKEN,
)
def test_what_is_no_json_object_is_refused_as_such(raw):
    assert refusal(raw).code == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (b'"count": "5"', "count", "invalid_type"),
        (b'"count": true', "count", "invalid_type"),
        (b'"count": 1.0', "count", "invalid_type"),
        (b'"count": null', "count", "invalid_type"),
        (b'"count": 1, "share": "0.5"', "share", "invalid_type"),
        (b'"count": 1, "share": false', "share", "invalid_type"),
        (b'"count": 1, "share": 1e999', "share", "invalid_value"),
        (b'"count": 1, "ids": [1, "2"]', "ids[1]", "invalid_type"),
        (b'"count": 1, "ids": {}', "ids", "invalid_type"),
        (b'"count": 1, "options": []', "options", "invalid_type"),
        (b'"count": 1, "options": {"other": 1}', "options.other", "unknown_parameter"),
        (b'"count": 1, "counts": 2', "counts", "unknown_parameter"),
        (b'"share": 1', "count", "missing_required_parameter"),
        (b'"count": 1, "later": 1', "later", "unsupported_parameter"),
    ],
)
def test_a_wrong_field_is_named(fields, param, code):
    error = refusal(b"{" + fields + b"}")
    assert (error.param, error.code) == (param, code)
    assert param in str(error)


def body_of(parts: int = 0, values: int = 0) -> bytes:
    """A JSON object with so many lists and fields, and values; longer than what is parsed on the loop."""
    lists = ",".join(["[]"] * max(0, parts - 5))
    numbers = ",".join(["1"] * max(1, values - parts - 1))
    return f'{{"a":[{lists}],"b":[{numbers}],"c":"{"x" * reading.INLINE_BYTES}"}}'.encode()


def test_a_body_of_too_many_parts_or_values_is_refused_before_it_is_parsed(monkeypatch):
    assert reading.json_object(body_of(parts=reading.MOST_PARTS - 1))["a"][0] == []
    assert len(reading.json_object(body_of(values=reading.MOST_VALUES))["b"]) > reading.MOST_VALUES - 10
    monkeypatch.setattr(reading, "from_json", lambda *given, **more: pytest.fail("it was parsed"))
    for raw, limit in (
        (body_of(parts=reading.MOST_PARTS + 10), f"{reading.MOST_PARTS} objects, lists and fields"),
        (body_of(values=reading.MOST_VALUES + 10), f"{reading.MOST_VALUES} values"),
        (b'{"a":' + b"[" * 40_000, f"{reading.MOST_PARTS} objects"),
        (b" \n {" + b"[" * 40_000, f"{reading.MOST_PARTS} objects"),
        (b'{"a":"' + b"x" * 40_000 + b'"' + b',"b":1' * 40_000, f"{reading.MOST_PARTS} objects"),
    ):
        with pytest.raises(ApiError, match=f"The request body has more than {limit}") as refused:
            reading.json_object(raw)
        assert (refused.value.status, refused.value.code) == (400, "request_too_complex")


@pytest.mark.parametrize(
    "text",
    [
        '{[:,"' * 200_000,
        "\\" * 100_000 + '"[[[' * 100_000,
        '"' * 100_000 + ":" * 100_000,
        "{" * 100_000 + "ü\\n",
    ],
)
def test_marks_within_texts_do_not_count(text):
    raw = json.dumps({"prompt": text, "other": [text, text]}, ensure_ascii=False).encode()
    assert reading.json_object(raw)["other"] == [text, text]


@pytest.mark.parametrize(
    "raw", [b'{"a":"' + b"[" * 70_000, b'"' * 70_000, b"\\" * 70_000, b'{"a":"\\' + b":" * 70_000]
)
def test_a_large_body_that_is_not_json_is_named_as_such(raw):
    with pytest.raises(ApiError) as refused:
        reading.json_object(raw)
    assert refused.value.code in ("invalid_json", "request_too_complex")


@pytest.mark.anyio
async def test_large_bodies_are_parsed_on_another_thread_and_small_ones_here():
    here = threading.current_thread()
    assert await reading.beside(b"x" * reading.INLINE_BYTES, threading.current_thread) is here
    other = await reading.beside(b"x" * (reading.INLINE_BYTES + 1), threading.current_thread)
    assert other.name.startswith("headrace-body")
    with pytest.raises(ApiError, match="not valid JSON"):
        await reading.parse_beside(b"{" + b" " * reading.INLINE_BYTES, Wire, {})


def fields(form: type[Wire], *, required: bool) -> list[str]:
    return [
        field.alias or name for name, field in form.model_fields.items() if field.is_required() is required
    ]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_null_for_an_optional_field_equals_leaving_it_out(form):
    smallest = example(form)
    without = valid(form, smallest)
    for name in fields(form, required=False):
        if name in smallest:
            continue
        given = valid(form, smallest | {name: None})
        assert (given, given.model_fields_set) == (without, without.model_fields_set)
    everything = smallest | {name: None for name in fields(form, required=False) if name not in smallest}
    assert valid(form, everything) == without


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_null_for_a_required_field_is_refused_by_its_name(form):
    for name in fields(form, required=True):
        with pytest.raises(ApiError) as error:
            valid(form, example(form) | {name: None})
        assert error.value.param == name
        assert name in str(error.value)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_an_unknown_field_is_refused_by_its_name(form):
    if form.model_config["extra"] == "allow":
        return
    with pytest.raises(ApiError) as error:
        valid(form, example(form) | {"zzz": 1})
    assert (error.value.param, error.value.code) == ("zzz", "unknown_parameter")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_an_unknown_null_is_refused_in_parameters_only(form):
    if form.model_config["extra"] == "allow":
        return
    body = example(form) | {"zzz": None}
    if issubclass(form, Replayed):
        assert valid(form, body) == valid(form, example(form))
        return
    with pytest.raises(ApiError) as error:
        valid(form, body)
    assert (error.value.param, error.value.code) == ("zzz", "unknown_parameter")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_an_error_does_not_repeat_a_long_value(form):
    names = [*fields(form, required=True), *fields(form, required=False), "z" * 300_000]
    errors = []
    for name in names:
        for value in ("x" * 300_000, ["x" * 300_000], {"x" * 300_000: "x" * 300_000}, 10**300):
            try:
                valid(form, example(form) | {name: value})
            except ApiError as error:
                errors.append(error.body())
    assert max(map(len, errors)) < 6000


OURS = re.compile(
    r"~|\b("
    + "|".join(form.__name__ for form in FORMS if form.__name__ not in ("Function", "Reasoning", "Message"))
    + r"|pydantic|instance of|function-\w+|dictionary|nullable|dict\[|list\[|constrained-\w+|lax-or-strict)\b"
)
"""Names of types, which no client knows."""


def is_place(path: str, body: object) -> bool:
    """Whether ``path`` leads to a value in ``body``, or to a field that is missing in an object of it."""
    steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)
    value = body
    for at, (index, name) in enumerate(steps):
        if index:
            if not isinstance(value, list) or int(index) >= len(value):
                return False
            value = value[int(index)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return isinstance(value, dict) and at == len(steps) - 1
    return True


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_an_error_names_a_place_in_the_body_and_no_type_of_ours(form):
    body = example(form) | LARGE.get(form.__name__, {})
    valid(form, body)
    errors = [(bad, error) for bad in broken(body) if (error := error_of(form, bad)) is not None]
    assert errors or not fields(form, required=True)
    for bad, error in errors:
        assert error.param is not None
        assert is_place(error.param, bad), (error.param, bad)
        assert not OURS.search(f"{error.param} {error}"), str(error)


def error_of(form: type[Wire], body: object) -> ApiError | None:
    if not isinstance(body, dict):
        return None
    try:
        valid(form, body)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(
    "raw", [b"[" * 70_000, b"[" + b"1," * 70_000, b"\xef\xbb\xbf{" + b" " * 70_000, b" " * 70_000]
)
def test_a_large_body_that_is_no_object_is_not_parsed(monkeypatch, raw):
    monkeypatch.setattr(reading, "from_json", lambda *given, **more: pytest.fail("it was parsed"))
    assert refusal(raw).code == "invalid_json"


@pytest.mark.parametrize("name", sorted(CHAT))
def test_null_and_neutral_values_ask_for_nothing(name):
    for neutral in (None, *CHAT[name]):
        assert refuse_unsupported({name: neutral, "n": 1}, CHAT) == {"n": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("verbosity", "low"),
        ("store", True),
        ("use_beam_search", 0),  # 0 == False, but it is not the neutral value
        ("best_of", True),
        ("audio", {}),
    ],
)
def test_what_asks_for_something_is_refused_by_name(name, value):
    with pytest.raises(ApiError) as error:
        refuse_unsupported({name: value}, CHAT)
    assert error.value.param == name
    assert error.value.code == "unsupported_parameter"
    assert "not supported yet" in str(error.value)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "assistant", "function_call": {}}, "messages[1].function_call"),
        (
            {"role": "user", "content": [{"type": "text"}, {"type": "video_url"}]},
            "messages[1].content[1].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type"),
    ],
)
def test_messages_are_looked_into(message, param):
    with pytest.raises(ApiError) as error:
        refuse_unsupported({"messages": [{"role": "user", "content": ""}, message]}, CHAT)
    assert error.value.param == param


def test_a_message_as_the_client_dumped_it_passes():
    message = {"role": "assistant", "content": "x", "function_call": None, "audio": None}
    kept = refuse_unsupported({"messages": [message, 5]}, CHAT)
    assert kept["messages"] == [{"role": "assistant", "content": "x"}, 5]


@pytest.mark.parametrize(
    ("table", "form"),
    [
        (CHAT, ChatBody),
        (COMPLETIONS, CompletionBody),
        (TOKENIZE, TokenizeBody),
        (TOKENIZE, TokenizeChatBody),
        (MESSAGE, Message),
    ],
)
def test_no_field_is_both_supported_and_not(table, form):
    assert not set(table) & set(form.model_fields)


def renamed(error: Exception) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as raised, named(NAMES):
        raise error
    return raised.value.param, str(raised.value)


def test_errors_have_the_names_of_the_dialect():
    broken = invalid("response_format: no such type", "response_format.json_schema")
    assert renamed(broken) == ("output_config.format", "output_config.format: no such type")
    assert renamed(InvalidParameter("stop", "stop must not be empty")) == (
        "stop_sequences",
        "stop_sequences must not be empty",
    )


def test_other_errors_stay_as_they_are():
    error = invalid("messages: the user may not stop", "messages")
    assert renamed(error) == ("messages", str(error))
