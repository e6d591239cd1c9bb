"""Reads ``multipart/form-data`` (RFC 7578) as it arrives, with limits and without buffering a part.

It is a state machine that turns bytes into events, without I/O.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from email.parser import HeaderParser
from enum import Enum
from typing import NamedTuple

MAX_HEADER_BYTES = 8192
MAX_PARTS = 16
MAX_BOUNDARY_CHARACTERS = 70

_HEADER_END = b"\r\n\r\n"


class MultipartError(ValueError):
    """The body is not a form; the message says why."""


class PartBegun(NamedTuple):
    """A part begins; ``filename`` is None for a plain field."""

    name: str
    filename: str | None


class PartData(NamedTuple):
    """Some bytes of the part that began last."""

    data: bytes


class PartEnded(NamedTuple):
    """The part that began last is complete."""


Event = PartBegun | PartData | PartEnded


class _State(Enum):
    PREAMBLE = "before the first part"
    DELIMITER = "after a boundary"
    HEADERS = "in the headers of a part"
    BODY = "in a part"
    END = "after the last part"


def boundary_of(content_type: str) -> bytes:
    """The boundary that a ``Content-Type`` header names.

    Raises:
        MultipartError: it is no ``multipart/form-data``, or has no usable boundary.
    """
    header = HeaderParser().parsestr(f"Content-Type: {content_type}")
    if header.get_content_type() != "multipart/form-data":
        raise MultipartError("the Content-Type must be multipart/form-data")
    try:
        boundary = header.get_boundary()
    except UnicodeError:  # spelled as RFC 2231 has it, in an encoding that it is not
        boundary = None
    if not boundary or len(boundary) > MAX_BOUNDARY_CHARACTERS or not boundary.isascii():
        raise MultipartError("the Content-Type has no usable boundary")
    return boundary.encode("ascii")


class MultipartReader:
    """Feed it the body piece by piece, then `close` it."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first boundary has no line break before it
        self._state = _State.PREAMBLE
        self._parts = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events of the next bytes.

        Raises:
            MultipartError: the body is malformed, or has too many parts or too long headers.
        """
        self._buffer += data
        more = True
        while more and self._state is not _State.END:
            match self._state:
                case _State.PREAMBLE | _State.BODY:
                    more = yield from self._content()
                case _State.DELIMITER:
                    more = self._after_delimiter()
                case _State.HEADERS:
                    more = yield from self._headers()
        if self._state is _State.END:
            self._buffer.clear()

    def close(self) -> None:
        """Mark the end of the body.

        Raises:
            MultipartError: the body ended too early.
        """
        if self._state is not _State.END:
            raise MultipartError(f"the form ends {self._state.value}")

    def _content(self) -> Generator[Event, None, bool]:
        in_part = self._state is _State.BODY
        at = self._buffer.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        if in_part and end:
            yield PartData(bytes(self._buffer[:end]))
        del self._buffer[:end]
        if at < 0:
            return False
        del self._buffer[: len(self._delimiter)]
        self._state = _State.DELIMITER
        if in_part:
            yield PartEnded()
        return True

    def _after_delimiter(self) -> bool:
        if len(self._buffer) < 2:
            return False
        mark = bytes(self._buffer[:2])
        if mark == b"--":
            self._state = _State.END
        elif mark == b"\r\n":
            self._state = _State.HEADERS
            self._parts += 1
            if self._parts > MAX_PARTS:
                raise MultipartError(f"the form has more than {MAX_PARTS} parts")
        else:
            raise MultipartError("a boundary is followed by other text")
        del self._buffer[:2]
        return True

    def _headers(self) -> Generator[Event, None, bool]:
        end = self._buffer.find(_HEADER_END, 0, MAX_HEADER_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_HEADER_BYTES:
                raise MultipartError(f"the headers of a part are longer than {MAX_HEADER_BYTES} bytes")
            return False
        begun = _part(bytes(self._buffer[: end + len(_HEADER_END)]))
        del self._buffer[: end + len(_HEADER_END)]
        self._state = _State.BODY
        yield begun
        return True


def _part(headers: bytes) -> PartBegun:
    parsed = HeaderParser().parsestr(headers.decode("latin-1"))
    if parsed.get_content_disposition() != "form-data":
        raise MultipartError("a part has no Content-Disposition: form-data")
    if parsed.get("content-transfer-encoding", "binary").strip().lower() not in ("binary", "7bit", "8bit"):
        raise MultipartError("a part has a Content-Transfer-Encoding, which forms must not use")
    name = parsed.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise MultipartError("a part has no name")
    try:
        filename = parsed.get_filename()
    except UnicodeError:
        raise MultipartError("a file name is not in the encoding that it names") from None
    return PartBegun(_text(name), None if filename is None else _text(filename))


def _text(value: str) -> str:
    """A header's text: clients send raw UTF-8, which was decoded as Latin-1."""
    try:
        return value.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:  # it was encoded in ASCII, as RFC 2231 defines
        return value.encode("utf-8", "replace").decode()  # some encodings contain lone surrogates
