"""Receives an uploaded file: parses the form as it arrives, and writes the file directly to disk."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from headrace.api.batch.batches import Batches
from headrace.api.batch.contents import Upload
from headrace.api.batch.multipart import (
    Event,
    MultipartError,
    MultipartReader,
    PartBegun,
    PartData,
    boundary_of,
)
from headrace.api.batch.records import INPUT_PURPOSE, FileRecord
from headrace.api.batch.store import QuotaExceeded
from headrace.api.batch.wire import (
    MAX_EXPIRY_SECONDS,
    MIN_EXPIRY_SECONDS,
    file_too_large,
    insufficient_storage,
    storage_quota_exceeded,
)
from headrace.api.body import body_pieces
from headrace.api.errors import ApiError, invalid

FORM_BYTES = 64 << 10
"""Maximum bytes of a form without its file."""

WRITE_BYTES = 256 << 10
"""Bytes that are buffered before they are written."""

MAX_FIELD_BYTES = 512
MAX_FILENAME_CHARACTERS = 512

PURPOSE = "purpose"
ANCHOR = "expires_after[anchor]"
SECONDS = "expires_after[seconds]"
OPTIONAL = (ANCHOR, SECONDS)
FIELDS = (PURPOSE, *OPTIONAL)

OTHER_PURPOSES = ("assistants", "evals", "fine-tune", "user_data", "vision")
"""OpenAI's purposes that this server does not support."""


class _Form:
    """The part of a form that has arrived; the file's bytes go to ``upload``."""

    def __init__(self, upload: Upload, limit: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._upload = upload
        self._limit = limit
        self._name = ""
        self._value = bytearray()

    async def take(self, event: Event) -> None:
        """Apply one event.

        Raises:
            ApiError: a field is unknown, repeated or too long.
        """
        match event:
            case PartBegun(name, filename):
                self._begin(name, filename)
            case PartData(data):
                self._value += data
                if self._name == "file":
                    if self._upload.nbytes + len(self._value) > self._limit:
                        raise file_too_large(self._limit)
                    if len(self._value) >= WRITE_BYTES:
                        await self._write()
                elif len(self._value) > MAX_FIELD_BYTES:
                    raise invalid(f"{self._name} is longer than {MAX_FIELD_BYTES} bytes", self._name)
            case _ if self._name == "file":
                await self._write()
            case _:
                text = self._value.decode("utf-8", "replace")
                if text or self._name not in OPTIONAL:  # a form has no null: clients send an empty text
                    self.fields[self._name] = text

    def _begin(self, name: str, filename: str | None) -> None:
        if name != "file" and name not in FIELDS:
            raise invalid(f"Unknown parameter: {name[:64]!r}.", name[:64], "unknown_parameter")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise invalid(f"{name} is given twice", name)
        if name == "file":
            if not filename:
                raise invalid("file must be sent as a file, with a file name", "file")
            self.filename = filename[:MAX_FILENAME_CHARACTERS]
        self._name = name
        self._value = bytearray()

    async def _write(self) -> None:
        data, self._value = bytes(self._value), bytearray()
        await asyncio.to_thread(self._upload.write, data)


async def receive(request: Request, batches: Batches, tenant: str) -> FileRecord:
    """Store the file of a form for ``tenant``.

    Raises:
        ApiError: the form is malformed, a field is wrong, or the file exceeds a limit of the tenant or the server.
    """
    limit = batches.bounds.file_bytes
    try:
        reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
        async with batches.upload(tenant) as upload:
            form = _Form(upload, limit)
            async for piece in body_pieces(request, limit + FORM_BYTES, file_too_large(limit)):
                for event in reader.feed(piece):
                    await form.take(event)
            reader.close()
            seconds = _check(form)
            return await batches.add_file(tenant, upload, form.filename or "", seconds)
    except MultipartError as error:
        raise invalid(f"The form cannot be read: {error}.", code="invalid_form") from None
    except QuotaExceeded as error:
        raise storage_quota_exceeded(str(error)) from None
    except OSError:
        raise insufficient_storage() from None


def _check(form: _Form) -> int | None:
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
            f"The purpose {purpose!r} is not supported; only 'batch' is", PURPOSE, "unsupported_parameter"
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
    return invalid(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
