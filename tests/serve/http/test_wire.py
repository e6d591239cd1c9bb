import pytest

from headrace.serve.http.errors import ApiError
from headrace.serve.http.generation.fields import StreamOptions
from headrace.serve.http.wire import Wire, parse


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
