"""Reads the body of a request: its bytes up to a limit, decoded, then the JSON in them, then its typed fields.

- Bytes are decoded (``Content-Encoding``, RFC 9110, section 8.4) piece by piece, by a chain of `Decoder`.
- A known field that is not supported yet is refused by name, unless it has a neutral value (`refuse_unsupported`).
- Each error names the field as the client spelled it (``messages[0].content``).
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, takewhile
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from headrace.api.errors import ApiError, invalid, not_supported, too_large, unsupported_encoding
from headrace.api.wire import NotYet, WireT, without
from headrace.core.constraint import WrittenFloat

ResultT = TypeVar("ResultT")

INLINE_BYTES = 32 * 1024
"""Bodies up to this length are parsed on the event loop, in less than a millisecond; longer ones beside it."""

MOST_PARTS = 32_768
"""Maximum objects, lists and fields of a body. Each costs a microsecond or more, and the interpreter's lock is held
while all of them are read."""

MOST_VALUES = 524_288
"""Maximum values of a body, such as the token ids of prompts."""

_PARSING = ThreadPoolExecutor(1, "headrace-body")
"""One thread: several would only compete for the interpreter with the event loop."""

_OBJECT = re.compile(rb"[ \t\r\n]*+\{")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

WITH_SCHEMAS = frozenset(
    (
        "functions",
        "guided_json",
        "output_config",
        "output_format",
        "requests",
        "response_format",
        "structured_outputs",
        "text",
        "tools",
    )
)
"""Fields of bodies that contain JSON schemas, whose numbers are enforced with all their digits."""

_LONG_NUMBER = re.compile(rb"[0-9.]{16}|[eE][+-]?[0-9]{3}")
"""Finds every fraction that a double may not hold exactly; a double holds 15 digits."""


async def typed_body(request: Request, limit: int, form: type[WireT], not_yet: NotYet) -> WireT:
    """The body of ``request`` as its type; ``not_yet`` has the fields that are not supported yet.

    Raises:
        ApiError: as `read_body` and `parse`.
    """
    return await parse_beside(await read_body(request, limit), form, not_yet)


async def read_body(request: Request, limit: int) -> bytes:
    """All bytes of the body, decoded.

    Raises:
        ApiError: as `body_pieces`; 413 if it is longer than ``limit`` bytes.
    """
    parts = bytearray()
    async for piece in body_pieces(request, limit, partial(too_large, limit)):
        parts += piece
    return bytes(parts)


async def body_pieces(request: Request, limit: int, too_long: Callable[[], ApiError]) -> AsyncIterator[bytes]:
    """The body as it arrives, decoded.

    An encoded body is decoded on a worker thread, because a few bytes may become megabytes.

    Raises:
        ApiError: what ``too_long`` makes if its ``Content-Length``, its content or its decoded content is longer than
            ``limit`` bytes; 415 if it has an unknown encoding; 400 if the encoding is broken or the client has left.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_long()
    received = 0
    try:
        encodings = request.headers.getlist("content-encoding")
        decoders = decoders_of(",".join(encodings), limit) if encodings else ()
        async for part in request.stream():
            received += len(part)
            if received > limit:
                raise too_long()
            if not decoders:
                yield part
                continue
            pieces = decoded(part, decoders)
            while piece := await asyncio.to_thread(next, pieces, b""):
                yield piece
        for decoder in decoders:
            decoder.finish()
    except ClientDisconnect:
        raise invalid(
            "The client disconnected before the body was complete.", code="incomplete_body"
        ) from None
    except UnknownEncoding as error:
        raise unsupported_encoding(str(error), ENCODINGS) from None
    except DecodedTooLong:
        raise too_long() from None
    except BrokenEncoding as error:
        why = f"The request body is not in its Content-Encoding: {error}."
        raise invalid(why, "Content-Encoding", "invalid_encoding") from None


async def beside(raw: bytes, read: Callable[[], ResultT]) -> ResultT:
    """What ``read`` returns, which parses ``raw``: on a thread if that takes long."""
    if len(raw) <= INLINE_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(_PARSING, read)


async def parse_beside(raw: bytes, form: type[WireT], not_yet: NotYet) -> WireT:
    """As `parse`, without holding up the event loop.

    Raises:
        ApiError: as `parse`.
    """
    return await beside(raw, lambda: parse(raw, form, not_yet))


def parse(raw: bytes, form: type[WireT], not_yet: NotYet) -> WireT:
    """The typed body of a request.

    Raises:
        ApiError: it is not a JSON object in UTF-8, or a field is wrong, unknown or not supported yet.
    """
    return valid(form, refuse_unsupported(json_object(raw), not_yet))


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: it is not a JSON object in UTF-8.
    """
    _check_size(raw)
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise _not_an_object()
    if not WITH_SCHEMAS.isdisjoint(body) and _LONG_NUMBER.search(raw):
        body.update(_with_digits(raw))
    return body


def _with_digits(raw: bytes) -> dict[str, Any]:
    """The fields of a body that contain schemas, in which fractions keep all their digits.

    Raises:
        ApiError: a number is too long, or the body too deep.
    """
    try:
        body: dict[str, Any] = json.loads(raw, parse_float=WrittenFloat)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request body cannot be read: {error}", code="invalid_json") from None
    return {name: body[name] for name in WITH_SCHEMAS & body.keys()}


def _not_an_object() -> ApiError:
    return invalid("The request body must be a JSON object.", code="invalid_json")


def _check_size(raw: bytes) -> None:
    """Raise ApiError if a body has more parts or values than can be read in a short time."""
    if len(raw) > INLINE_BYTES and not _OBJECT.match(raw):
        raise _not_an_object()
    if len(raw) <= INLINE_BYTES or not _too_many(
        raw.count(b"{") + raw.count(b"[") + raw.count(b":"), raw.count(b",")
    ):
        return
    parts = values = at = 0  # texts may have many such characters: count again without them
    for text in chain(_STRING.finditer(raw), (None,)):
        end = len(raw) if text is None else text.start()
        parts += raw.count(b"{", at, end) + raw.count(b"[", at, end) + raw.count(b":", at, end)
        values += raw.count(b",", at, end)
        if why := _too_many(parts, values):
            raise invalid(f"The request body has more than {why}.", code="request_too_complex")
        at = end if text is None else text.end()


def _too_many(parts: int, values: int) -> str:
    """The limit that is exceeded, or an empty text."""
    if parts > MOST_PARTS:
        return f"{MOST_PARTS} objects, lists and fields"
    return f"{MOST_VALUES} values" if values > MOST_VALUES else ""


def valid(form: type[WireT], body: Mapping[str, Any]) -> WireT:
    """A JSON object as its type.

    Raises:
        ApiError: a field is wrong or unknown.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        raise _first_error(error, body) from None


def _first_error(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    found = error.errors(include_url=False, include_input=False)
    first = found[0]
    param, kind = _path(first, body), first["type"]
    if kind == "missing":
        return invalid(f"Missing required parameter: {param!r:.200}.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return invalid(f"Unknown parameter: {param!r:.200}.", param, "unknown_parameter")
    what = "type" if kind.endswith("_type") else "value"
    reason = _reasons(takewhile(lambda each: _path(each, body) == param, found))
    return invalid(f"Invalid {what} for {param!r:.200}: {reason}.", param, f"invalid_{what}")


def reason_of(error: ValidationError) -> str:
    """The reason of the first error, without its field."""
    return _reason(error.errors(include_url=False, include_input=False)[0])


_REASONS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "model_type": lambda _: "should be an object",
    "dict_type": lambda _: "should be an object",
    "model_attributes_type": lambda _: "should be an object",
    "too_short": lambda _: "is too short",
    "union_tag_not_found": lambda context: f"should be an object with the field {context['discriminator']}",
    "union_tag_invalid": lambda context: (
        f"its field {context['discriminator']} should be one of {context['expected_tags']}"
    ),
}
"""Reasons whose text in pydantic shows its own words."""


def _reason(error: Mapping[str, Any]) -> str:
    made = _REASONS.get(error["type"])
    return str(error["msg"]).removeprefix("Input ") if made is None else made(error.get("ctx", {}))


def _reasons(errors: Iterable[Mapping[str, Any]]) -> str:
    """The reasons of the errors of one value: several if it may have several types, and has none of them."""
    first, *others = dict.fromkeys(map(_reason, errors))
    return " or ".join([first, *(each.removeprefix("should be ") for each in others)])


def _path(error: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """The place of an error in ``body``.

    pydantic's location also has the names of types and tags, which are not part of the body.
    """
    location: Sequence[int | str] = error["loc"]
    path = ""
    value: Any = body
    for at, part in enumerate(location):
        absent = at == len(location) - 1 and error["type"] == "missing"
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif (isinstance(value, dict) and part in value) or absent:
            path += f".{part}" if path else part
            value = None if absent else value[part]
    return path


MESSAGE: NotYet = {"function_call": (), "audio": ()}
_ROLES = ("function",)


def refuse_unsupported(body: Mapping[str, Any], not_yet: NotYet) -> dict[str, Any]:
    """``body`` without the fields of ``not_yet``.

    Raises:
        ApiError: one of them has a value that is not neutral.
    """
    kept = without(body, not_yet, "")
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return kept


def _message(message: object, path: str) -> object:
    """One message without neutral unsupported fields; a value that is no object is left to validation."""
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    if role in _ROLES:
        raise not_supported(f"{path}.role", f"The role {role!r:.200}")
    kinds = ("text", "refusal") if role == "assistant" else ("text", "image_url")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise not_supported(f"{path}.content[{i}].type", f"Content of type {kind!r:.200}")
    return without(message, MESSAGE, f"{path}.")


ENCODINGS = ("gzip", "deflate")
"""The encodings that can be decoded. ``x-gzip`` is gzip, and ``identity`` is no encoding."""

MAX_ENCODINGS = 4
"""Maximum encodings of one body."""

PIECE_BYTES = 256 << 10
"""Maximum bytes that are decoded at once."""

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's numbers for the formats


class UnknownEncoding(ValueError):
    """An encoding that cannot be decoded, or too many of them; the message says which."""


class BrokenEncoding(ValueError):
    """The body is not in the encoding that it names; the message says why."""


class DecodedTooLong(ValueError):
    """The decoded body is longer than the limit."""


class Decoder:
    """Decodes one encoding; ``limit`` is the maximum length of its output in bytes."""

    def __init__(self, encoding: str, limit: int) -> None:
        self._encoding = encoding
        self._room = limit
        self._head = b""
        self._stream = zlib.decompressobj(_GZIP) if encoding == "gzip" else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The output for the next bytes, in pieces.

        Raises:
            BrokenEncoding: the data are not in this encoding.
            DecodedTooLong: the output is longer than the limit.
        """
        if self._stream is None:
            self._head += data
            if len(self._head) < 2:
                return
            self._stream, data = zlib.decompressobj(_form(self._head)), self._head
        elif data:
            self._head = data[:1]  # marks that the body is not empty
        while True:
            if self._stream.eof and data:
                if self._encoding != "gzip":
                    raise BrokenEncoding("there is more data after its end")
                self._stream = zlib.decompressobj(_GZIP)  # a gzip file may have several members
            try:
                piece = self._stream.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise BrokenEncoding(str(error).partition(": ")[2] or str(error)) from None
            data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            self._room -= len(piece)
            if self._room < 0:
                raise DecodedTooLong
            if piece:
                yield piece
            if not data and len(piece) < PIECE_BYTES:
                return

    def finish(self) -> None:
        """Mark the end of the data.

        Raises:
            BrokenEncoding: the data ended too early.
        """
        if self._head and (self._stream is None or not self._stream.eof):
            raise BrokenEncoding("it ends too early")


def _form(head: bytes) -> int:
    """The format of ``deflate``: zlib's, as the standard says, or without its header, as some clients send it."""
    return _ZLIB if head[0] & 15 == 8 and (head[0] << 8 | head[1]) % 31 == 0 else _RAW


def decoders_of(header: str, limit: int) -> list[Decoder]:
    """The decoders of a ``Content-Encoding`` header, in the order of decoding; none for ``identity``.

    Raises:
        UnknownEncoding: it names an encoding that cannot be decoded, or too many.
    """
    names = [name.strip().lower().removeprefix("x-") for name in header.split(",")]
    named = [name for name in names if name not in ("", "identity")]
    unknown = next((name for name in named if name not in ENCODINGS), None)
    if unknown is not None:
        raise UnknownEncoding(f"Content-Encoding {unknown[:40]!r} is not supported")
    if len(named) > MAX_ENCODINGS:
        raise UnknownEncoding(f"Content-Encoding names {len(named)} encodings, more than {MAX_ENCODINGS}")
    return [Decoder(name, limit) for name in reversed(named)]


def decoded(data: bytes, decoders: Sequence[Decoder]) -> Iterator[bytes]:
    """The output of a chain of decoders for the next bytes; errors as `Decoder.feed`."""
    if not decoders:
        yield data
        return
    for piece in decoders[0].feed(data):
        yield from decoded(piece, decoders[1:])
