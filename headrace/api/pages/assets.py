"""The built files of the pages, with caching and security headers.

A page loads nothing from other hosts. The documents reference their files with a digest, so that browsers may cache the
files permanently; the documents themselves are revalidated by ``ETag`` each time.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Content types by file extension; files with another extension are not served."""

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

FOR_GOOD = "public, max-age=31536000, immutable"
COMPARE = "no-cache"

LEAST_COMPRESSED = 1024
"""Smaller files are not compressed."""


class Asset(NamedTuple):
    """A file, whole and compressed (None: too small), and its digest."""

    content: bytes
    compressed: bytes | None
    kind: str
    digest: str


class Assets:
    """The files, read and compressed once, at the first request."""

    def response(self, name: str, headers: Headers, version: str | None = None) -> Response | None:
        """A file for a request with these headers; None if there is none of this name.

        If ``version`` is its digest, the browser may cache it permanently.
        """
        asset = self._assets.get(name)
        if asset is None:
            return None
        tag = f'"{asset.digest}"'
        kept = {
            **SECURITY,
            "ETag": tag,
            "Cache-Control": FOR_GOOD if version == asset.digest else COMPARE,
            "Vary": "Accept-Encoding",
        }
        if tag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=kept)
        accepts = [each.partition(";")[0].strip() for each in headers.get("accept-encoding", "").split(",")]
        if asset.compressed is not None and "gzip" in accepts:
            kept["Content-Encoding"] = "gzip"
            return Response(asset.compressed, headers=kept, media_type=asset.kind)
        return Response(asset.content, headers=kept, media_type=asset.kind)

    @cached_property
    def _assets(self) -> Mapping[str, Asset]:
        folder = files(__package__).joinpath("static")
        contents = {
            each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in TYPES
        }
        for name in [name for name in contents if name.endswith(".html")]:
            for other in [each for each in contents if not each.endswith(".html")]:
                path = f"dashboard/{other}".encode()
                contents[name] = contents[name].replace(
                    path, path + b"?v=" + _digest(contents[other]).encode()
                )
        return {name: _asset(name, content) for name, content in contents.items()}


def _asset(name: str, content: bytes) -> Asset:
    compressed = gzip.compress(content, 9, mtime=0) if len(content) >= LEAST_COMPRESSED else None
    return Asset(content, compressed, TYPES[name.rpartition(".")[2]], _digest(content))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
