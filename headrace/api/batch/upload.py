"""Receives an uploaded file: parses the form as it arrives, and writes the file directly to disk."""

from __future__ import annotations

import asyncio
import logging
from email.parser import HeaderParser
from functools import partial
from typing import Literal

from pydantic import Field
from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from starlette.requests import Request

from headrace.api.batch.batches import Batches
from headrace.api.batch.store import INPUT_PURPOSE, FileRecord, QuotaExceeded, Upload
from headrace.api.body import body_pieces
from headrace.api.errors import ApiError, invalid
from headrace.api.wire import Wire

FORM_BYTES = 64 << 10
"""Maximum bytes of a form without its file."""

WRITE_BYTES = 256 << 10
"""Bytes that are buffered before they are written."""

MAX_PARTS = 16
MAX_HEADER_BYTES = 8192
MAX_BOUNDARY_CHARACTERS = 70
MAX_FIELD_BYTES = 512
MAX_FILENAME_CHARACTERS = 512

PURPOSE = "purpose"
ANCHOR = "expires_after[anchor]"
SECONDS = "expires_after[seconds]"
OPTIONAL = (ANCHOR, SECONDS)
FIELDS = (PURPOSE, *OPTIONAL)

OTHER_PURPOSES = ("assistants", "evals", "fine-tune", "user_data", "vision")
"""OpenAI's purposes that this server does not support."""


MIN_EXPIRY_SECONDS = 3600
MAX_EXPIRY_SECONDS = 30 * 86_400


class ExpiresAfter(Wire):
    """When files are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(
        ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS, description="Lifetime after the anchor."
    )


class UploadForm(Wire):
    """The form of ``POST /v1/files``, for the API description; `batch.upload` parses it."""

    file: str = Field(
        json_schema_extra={"format": "binary"}, description="Requests, one JSON object per line."
    )
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = Field(
        None, description="Sent as expires_after[anchor] and expires_after[seconds]; default: 30 days."
    )


class FormError(ValueError):
    """The body is not a form; the message says why."""


class Form:
    """A ``multipart/form-data`` body (RFC 7578) as it arrives: `feed` it piece by piece, then `close` it.

    ``fields`` are the complete fields. ``pending`` has the file's bytes that have arrived and are not written yet.
    """

    def __init__(self, boundary: bytes, limit: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pending = bytearray()
        self._limit = limit
        self._parts = self._file_bytes = 0
        self._complete = False
        self._header, self._content, self._headers = bytearray(), bytearray(), bytearray()
        self._name = ""
        self._value = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begun,
                "on_header_field": lambda data, start, end: self._header_read(self._header, data[start:end]),
                "on_header_value": lambda data, start, end: self._header_read(self._content, data[start:end]),
                "on_header_end": self._header_ended,
                "on_headers_finished": self._headers_ended,
                "on_part_data": lambda data, start, end: self._data_read(data[start:end]),
                "on_part_end": self._part_ended,
                "on_end": self._ended,
            },
            max_header_count=MAX_HEADER_BYTES,
            max_header_size=MAX_HEADER_BYTES,
        )
        self._parser.logger = logging.Logger(__name__, logging.CRITICAL)  # it warns of what clients do wrong

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body.

        Raises:
            FormError: the body is malformed, or has too many parts or too long headers.
            ApiError: a field is unknown, repeated or too long, or the file is too long.
        """
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise FormError(str(error)) from None

    def close(self) -> int | None:
        """Mark the end of the body; returns the file's lifetime in seconds, None for the default.

        Raises:
            FormError: the body ended too early.
            ApiError: a field is missing or wrong.
        """
        if not self._complete:
            raise FormError("the form ends before its last boundary")
        return _check(self)

    def _part_begun(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise FormError(f"the form has more than {MAX_PARTS} parts")
        self._headers.clear()

    def _header_read(self, into: bytearray, data: bytes) -> None:
        into += data
        if len(self._headers) + len(self._header) + len(self._content) > MAX_HEADER_BYTES:
            raise FormError(f"the headers of a part are longer than {MAX_HEADER_BYTES} bytes")

    def _header_ended(self) -> None:
        self._headers += self._header + b": " + self._content + b"\r\n"
        self._header.clear()
        self._content.clear()

    def _headers_ended(self) -> None:
        name, filename = _part(bytes(self._headers))
        if name != "file" and name not in FIELDS:
            raise invalid(f"Unknown parameter: {name[:64]!r}.", name[:64], "unknown_parameter")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise invalid(f"{name} is given twice", name)
        if name == "file":
            if not filename:
                raise invalid("file must be sent as a file, with a file name", "file")
            self.filename = filename[:MAX_FILENAME_CHARACTERS]
        self._name = name
        self._value.clear()

    def _data_read(self, data: bytes) -> None:
        if self._name == "file":
            self._file_bytes += len(data)
            if self._file_bytes > self._limit:
                raise file_too_large(self._limit)
            self.pending += data
            return
        self._value += data
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid(f"{self._name} is longer than {MAX_FIELD_BYTES} bytes", self._name)

    def _part_ended(self) -> None:
        text = self._value.decode("utf-8", "replace")
        # A form has no null: clients send an empty text for an optional field.
        if self._name != "file" and (text or self._name not in OPTIONAL):
            self.fields[self._name] = text

    def _ended(self) -> None:
        self._complete = True


def boundary_of(content_type: str) -> bytes:
    """The boundary that a ``Content-Type`` header names.

    Raises:
        FormError: it is no ``multipart/form-data``, or has no usable boundary.
    """
    header = HeaderParser().parsestr(f"Content-Type: {content_type}")
    if header.get_content_type() != "multipart/form-data":
        raise FormError("the Content-Type must be multipart/form-data")
    try:
        boundary = header.get_boundary()
    except UnicodeError:  # spelled as RFC 2231 has it, in an encoding that it is not
        boundary = None
    if not boundary or len(boundary) > MAX_BOUNDARY_CHARACTERS or not boundary.isascii():
        raise FormError("the Content-Type has no usable boundary")
    return boundary.encode("ascii")


def _part(headers: bytes) -> tuple[str, str | None]:
    """The name of a part, and its file name (None: it is a plain field)."""
    parsed = HeaderParser().parsestr(headers.decode("latin-1"))
    if parsed.get_content_disposition() != "form-data":
        raise FormError("a part has no Content-Disposition: form-data")
    if parsed.get("content-transfer-encoding", "binary").strip().lower() not in ("binary", "7bit", "8bit"):
        raise FormError("a part has a Content-Transfer-Encoding, which forms must not use")
    name = parsed.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise FormError("a part has no name")
    try:
        filename = parsed.get_filename()
    except UnicodeError:
        raise FormError("a file name is not in the encoding that it names") from None
    return _text(name), None if filename is None else _text(filename)


def _text(value: str) -> str:
    """A header's text: clients send raw UTF-8, which was decoded as Latin-1."""
    try:
        return value.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:  # it was encoded in ASCII, as RFC 2231 defines
        return value.encode("utf-8", "replace").decode()  # some encodings contain lone surrogates


async def receive(request: Request, batches: Batches, tenant: str) -> FileRecord:
    """Store the file of a form for ``tenant``.

    Raises:
        ApiError: the form is malformed, a field is wrong, or the file exceeds a limit of the tenant or the server.
    """
    limit = batches.bounds.file_bytes
    try:
        form = Form(boundary_of(request.headers.get("content-type", "")), limit)
        async with batches.upload(tenant) as upload:
            async for piece in body_pieces(request, limit + FORM_BYTES, partial(file_too_large, limit)):
                form.feed(piece)
                if len(form.pending) >= WRITE_BYTES:
                    await _write(form, upload)
            seconds = form.close()
            await _write(form, upload)
            return await batches.add_file(tenant, upload, form.filename or "", seconds)
    except FormError as error:
        raise invalid(f"The form cannot be read: {error}.", code="invalid_form") from None
    except QuotaExceeded as error:
        raise storage_quota_exceeded(str(error)) from None
    except OSError:
        raise insufficient_storage() from None


async def _write(form: Form, upload: Upload) -> None:
    """Write the pending bytes of the file."""
    data = bytes(form.pending)
    form.pending.clear()
    await asyncio.to_thread(upload.write, data)


def _check(form: Form) -> int | None:
    """Check the fields of a complete form; returns the file's lifetime in seconds, None for the default.

    Raises:
        ApiError: a field is missing or wrong.
    """
    if form.filename is None:
        raise _missing("file")
    purpose = form.fields.get(PURPOSE)
    if purpose is None:
        raise _missing(PURPOSE)
    if purpose in OTHER_PURPOSES:
        raise invalid(
            f"The purpose {purpose!r:.200} is not supported; only 'batch' is",
            PURPOSE,
            "unsupported_parameter",
        )
    if purpose != INPUT_PURPOSE:
        raise invalid(f"purpose must be 'batch', got {purpose[:64]!r}", PURPOSE)
    if ANCHOR not in form.fields and SECONDS not in form.fields:
        return None
    for name in (ANCHOR, SECONDS):
        if name not in form.fields:
            raise _missing(name)
    if form.fields[ANCHOR] != "created_at":
        raise invalid("expires_after[anchor] must be 'created_at'", ANCHOR)
    given = form.fields[SECONDS]
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise invalid("expires_after[seconds] must be a whole number", SECONDS)
    if not MIN_EXPIRY_SECONDS <= int(given) <= MAX_EXPIRY_SECONDS:
        raise invalid(f"expires_after[seconds] must be {MIN_EXPIRY_SECONDS} to {MAX_EXPIRY_SECONDS}", SECONDS)
    return int(given)


def _missing(param: str) -> ApiError:
    return invalid(f"Missing required parameter: {param!r:.200}.", param, "missing_required_parameter")


def file_too_large(limit: int) -> ApiError:
    """413: the file is larger than the server accepts."""
    return ApiError(413, f"The file is larger than {limit} bytes.", param="file", code="file_too_large")


def storage_quota_exceeded(why: str) -> ApiError:
    """403: the tenant stores as much as it may."""
    return ApiError(403, f"The file cannot be stored: {why}.", param="file", code="storage_quota_exceeded")


def insufficient_storage() -> ApiError:
    """507: the server's disk is full or failed."""
    return ApiError(
        507, "The server has no room to store the file.", type="server_error", code="insufficient_storage"
    )
