"""Reads the body of a request: decodes its ``Content-Encoding``, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from headrace.api.content_encoding import (
    BrokenEncoding,
    DecodedTooLong,
    UnknownEncoding,
    decoded,
    decoders_of,
)
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
        raise unsupported_encoding(str(error)) from None
    except DecodedTooLong:
        raise too_long from None
    except BrokenEncoding as error:
        why = f"The request body is not in its Content-Encoding: {error}."
        raise invalid(why, "Content-Encoding", "invalid_encoding") from None
