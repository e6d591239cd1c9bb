"""Reads the body of a request: decodes its ``Content-Encoding`` (RFC 9110, section 8.4), up to a limit.

Bodies are decoded piece by piece, by a chain of `Decoder` that turn bytes into bytes, without I/O.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence

from starlette.requests import ClientDisconnect, Request

from headrace.api.errors import ApiError, invalid, too_large, unsupported_encoding


async def read_body(request: Request, limit: int) -> bytes:
    """All bytes of the body, decoded.

    Raises:
        ApiError: as `body_pieces`; 413 if it is longer than ``limit`` bytes.
    """
    parts = bytearray()
    async for piece in body_pieces(request, limit, too_large(limit)):
        parts += piece
    return bytes(parts)


async def body_pieces(request: Request, limit: int, too_long: ApiError) -> AsyncIterator[bytes]:
    """The body as it arrives, decoded.

    An encoded body is decoded on a worker thread, because a few bytes may become megabytes.

    Raises:
        ApiError: ``too_long`` if its ``Content-Length``, its content or its decoded content is longer than ``limit``
            bytes; 415 if it has an unknown encoding; 400 if the encoding is broken or the client disconnected.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    received = 0
    try:
        decoders = decoders_of(",".join(request.headers.getlist("content-encoding")), limit)
        async for part in request.stream():
            received += len(part)
            if received > limit:
                raise too_long
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
        raise too_long from None
    except BrokenEncoding as error:
        why = f"The request body is not in its Content-Encoding: {error}."
        raise invalid(why, "Content-Encoding", "invalid_encoding") from None


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
