from contextlib import suppress

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.batch.upload import (
    MAX_FIELD_BYTES,
    MAX_HEADER_BYTES,
    MAX_PARTS,
    Form,
    FormError,
    boundary_of,
)
from headrace.api.errors import ApiError

PURPOSE = 'form-data; name="purpose"'
FILE = 'form-data; name="file"; filename="a.jsonl"'


def read(body: bytes, boundary: bytes = b"x", sizes: tuple[int, ...] = (), limit: int = 1000) -> Form:
    """A form that arrives in pieces of ``sizes``, then the rest; it may lack fields."""
    form = Form(boundary, limit)
    for size in sizes:
        form.feed(body[:size])
        body = body[size:]
    form.feed(body)
    with suppress(ApiError):
        form.close()
    return form


def part(value: bytes, disposition: str = FILE, boundary: bytes = b"x") -> bytes:
    return b"--" + boundary + f"\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + value + b"\r\n"


def test_a_field_and_a_file() -> None:
    form = read(part(b"batch", PURPOSE) + part(b"{}\n") + b"--x--\r\n")
    assert (form.fields, form.filename, bytes(form.pending)) == ({"purpose": "batch"}, "a.jsonl", b"{}\n")


@given(
    st.binary(max_size=300),
    st.binary(max_size=60),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=12),
)
@settings(max_examples=200)
def test_a_form_reads_the_same_however_it_is_split(
    value: bytes, seconds: bytes, file_first: bool, sizes: list[int]
) -> None:
    """What another program writes is read again, in whatever pieces it arrives."""
    parts = [("file", ("ü 1.jsonl", value)), ("expires_after[seconds]", (None, seconds))]
    request = httpx.Request("POST", "http://x", files=parts if file_first else parts[::-1])
    boundary = boundary_of(request.headers["content-type"])
    form = read(request.read(), boundary, tuple(sizes))
    text = seconds.decode("utf-8", "replace")
    assert form.fields == ({"expires_after[seconds]": text} if text else {})
    assert (form.filename, bytes(form.pending)) == ("ü 1.jsonl", value)


PIECES = (b"\r", b"\n", b"-", b"x", b"y", b"\r\n--", b"\r\n--xy")


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.integers(1, 40))
@settings(max_examples=200)
def test_bytes_that_look_like_a_boundary_stay_in_the_file(pieces: list[bytes], size: int) -> None:
    value, boundary = b"".join(pieces), b"xyzx"
    body = part(value, boundary=boundary) + b"--xyzx--"
    assert bytes(read(body, boundary, (size,) * (len(body) // size)).pending) == value


def test_text_after_the_form_is_left_out() -> None:
    assert bytes(read(part(b"1") + b"--x--\r\nbye").pending) == b"1"


def test_a_file_name_in_the_spelling_of_rfc_2231() -> None:
    disposition = "form-data; name=\"file\"; filename*=UTF-8''%E2%82%AC.jsonl"
    assert read(part(b"", disposition) + b"--x--").filename == "€.jsonl"


def test_a_file_name_with_a_lone_surrogate_can_be_stored() -> None:
    disposition = "form-data; name=\"file\"; filename*=unicode_escape''a%5Cud800"
    assert read(part(b"1", disposition) + b"--x--").filename == "a?"


@pytest.mark.parametrize("encoding", ["punycode", "idna", "undefined"])
def test_a_name_that_is_not_in_its_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(FormError, match="file name"):
        read(part(b"1", f"form-data; name=\"file\"; filename*={encoding}''%80") + b"--x--")
    with pytest.raises(FormError, match="boundary"):
        boundary_of(f"multipart/form-data; boundary*={encoding}''%80")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends before its last boundary"),
        (b"--x\r\nContent-Disp", "ends before its last boundary"),
        (part(b"1"), "ends before its last boundary"),
        (part(b"1") + b"--x", "ends before its last boundary"),
        (part(b"1") + b"--xyz", "ends before its last boundary"),
        (b"hello\r\n" + part(b"1") + b"--x--", "boundary character"),
        (b"--xyz\r\n", "boundary"),
        (b"--x\r\nA: b\r\n\r\n", "no Content-Disposition"),
        (part(b"1", "form-data"), "has no name"),
        (part(b"1", 'attachment; name="file"'), "no Content-Disposition: form-data"),
        (b"--x\r\n" + b"A: bbbbb\r\n" * MAX_HEADER_BYTES, "headers of a part are longer"),
        (b"--x\r\nA: " + b"b" * MAX_HEADER_BYTES, "header size"),
        (b"--x\r\n\r\n", "no Content-Disposition"),
        (part(b"1", FILE + "\r\nContent-Transfer-Encoding: base64"), "Content-Transfer-Encoding"),
        *((part(b"", 'form-data; name="expires_after[anchor]"') * (MAX_PARTS + 1), "more than 16 parts"),),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, message: str, caplog: pytest.LogCaptureFixture) -> None:
    for sizes in ((), (1,) * min(len(body), 2000)):
        with pytest.raises(FormError, match=message):
            read(body, sizes=sizes)
    assert not caplog.records  # a client that errs does not fill the log


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (part(b"", 'form-data; name="user"'), "user"),
        (part(b"", 'form-data; name="file"'), "file"),
        (part(b"1") * 2, "file"),
        (part(b"1", PURPOSE) * 2, "purpose"),
        (part(b"1" * (MAX_FIELD_BYTES + 1), PURPOSE), "purpose"),
    ],
)
def test_fields_that_are_unknown_repeated_or_too_long_are_refused(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(body + b"--x--")
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_file_that_is_too_long_is_refused_before_it_ends() -> None:
    form = Form(b"x", 10)
    form.feed(part(b"1" * 9)[:-2])
    with pytest.raises(ApiError) as refused:
        form.feed(b"11")
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"],
)
def test_a_content_type_without_a_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(FormError, match="Content-Type"):
        boundary_of(content_type)


def test_memory_does_not_grow_with_a_file() -> None:
    form = Form(b"x", 1 << 30)
    form.feed(part(b"")[:-2])
    for _ in range(100):
        form.feed(b"y" * 10_000)
        assert len(form.pending) >= 9_990
        form.pending.clear()
        assert len(form._value) + len(form._headers) < 200
