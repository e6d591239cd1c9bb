import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.batch.multipart import (
    MAX_HEADER_BYTES,
    MAX_PARTS,
    MultipartError,
    MultipartReader,
    PartBegun,
    PartData,
    PartEnded,
    boundary_of,
)

Part = tuple[str, str | None, bytes]


def read(body: bytes, boundary: bytes = b"x", sizes: tuple[int, ...] = ()) -> list[Part]:
    """The parts of a form that arrives in pieces of ``sizes``, then the rest."""
    reader = MultipartReader(boundary)
    parts: list[Part] = []
    pieces = []
    for size in sizes:
        pieces.append(body[:size])
        body = body[size:]
    for piece in [*pieces, body]:
        for event in reader.feed(piece):
            match event:
                case PartBegun(name, filename):
                    parts.append((name, filename, b""))
                case PartData(data):
                    parts[-1] = (*parts[-1][:2], parts[-1][2] + data)
                case PartEnded():
                    assert parts
    reader.close()
    return parts


def part(value: bytes, disposition: str = 'form-data; name="a"', boundary: bytes = b"x") -> bytes:
    return b"--" + boundary + f"\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + value + b"\r\n"


def test_fields_and_a_file() -> None:
    body = part(b"batch", 'form-data; name="purpose"') + part(
        b"{}\n", 'form-data; name="file"; filename="a.jsonl"'
    )
    assert read(body + b"--x--\r\n") == [("purpose", None, b"batch"), ("file", "a.jsonl", b"{}\n")]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=200)), max_size=5),
    st.lists(st.integers(0, 60), max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_a_form_reads_the_same_however_it_is_split(fields: list[tuple[str, bytes]], sizes: list[int]) -> None:
    """What another program writes is read again, in whatever pieces it arrives."""
    files = [(name, ("ü 1.jsonl", value)) for name, value in fields]
    request = httpx.Request("POST", "http://x", files=files or None, data=None if files else {})
    if not fields:
        return
    boundary = boundary_of(request.headers["content-type"])
    body = request.read()
    assert read(body, boundary, tuple(sizes)) == [(name, "ü 1.jsonl", value) for name, value in fields]


def test_bytes_that_look_like_a_boundary_stay_in_the_file() -> None:
    value = b"\r\n--y\r\n--\r\n\r-x"
    assert read(part(value) + b"--x--") == [("a", None, value)]


def test_text_before_and_after_the_form_is_left_out() -> None:
    assert read(b"hello\r\n" + part(b"1") + b"--x--\r\nbye") == [("a", None, b"1")]


def test_a_file_name_in_the_spelling_of_rfc_2231() -> None:
    disposition = "form-data; name=\"file\"; filename*=UTF-8''%E2%82%AC.jsonl"
    assert read(part(b"", disposition) + b"--x--")[0][1] == "€.jsonl"


def test_a_file_name_with_a_lone_surrogate_can_be_stored() -> None:
    disposition = "form-data; name=\"file\"; filename*=unicode_escape''a%5Cud800"
    assert read(part(b"1", disposition) + b"--x--") == [("file", "a?", b"1")]


@pytest.mark.parametrize("encoding", ["punycode", "idna", "undefined"])
def test_a_name_that_is_not_in_its_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(MultipartError, match="file name"):
        read(part(b"1", f"form-data; name=\"file\"; filename*={encoding}''%80") + b"--x--")
    with pytest.raises(MultipartError, match="boundary"):
        boundary_of(f"multipart/form-data; boundary*={encoding}''%80")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends before the first part"),
        (b"--x\r\nContent-Disp", "ends in the headers of a part"),
        (part(b"1"), "ends in a part"),
        (part(b"1") + b"--x", "ends after a boundary"),
        (part(b"1") + b"--xyz", "followed by other text"),
        (b"--x\r\nA: b\r\n\r\n", "no Content-Disposition"),
        (part(b"1", "form-data"), "has no name"),
        (part(b"1", 'attachment; name="a"'), "no Content-Disposition: form-data"),
        (b"--x\r\nA: " + b"b" * MAX_HEADER_BYTES, "headers of a part are longer"),
        (part(b"1") * (MAX_PARTS + 1), "more than 16 parts"),
        (part(b"1", 'form-data; name="a"\r\nContent-Transfer-Encoding: base64'), "Content-Transfer-Encoding"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(MultipartError, match=message):
        read(body)


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"],
)
def test_a_content_type_without_a_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(MultipartError, match="Content-Type"):
        boundary_of(content_type)


def test_memory_does_not_grow_with_a_part() -> None:
    reader = MultipartReader(b"x")
    list(reader.feed(part(b"")[:-2]))
    for _ in range(100):
        read_bytes = sum(
            len(event.data) for event in reader.feed(b"y" * 10_000) if isinstance(event, PartData)
        )
        assert read_bytes >= 9_990
        assert len(reader._buffer) < 10
