"""Reads the body of a request, up to a limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from headrace.serve.http.errors import invalid, too_large


async def read_body(request: Request, limit: int) -> bytes:
    """All bytes of the body.

    Raises:
        ApiError: its ``Content-Length`` or its content is longer than ``limit`` bytes (413).
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    parts = bytearray()
    try:
        async for part in request.stream():
            parts += part
            if len(parts) > limit:
                raise too_large(limit)
    except ClientDisconnect:
        raise invalid(
            "The client disconnected before the body was complete.", code="incomplete_body"
        ) from None
    return bytes(parts)
