"""The pages' endpoints: the documents with their files, and the live stream, whose parts depend on the role.

The documents and files hold no data and need no key. The page asks for a key and sends it with each request. It loads
nothing from other hosts. Documents reference their files with a digest, so that browsers may cache the files
permanently; the documents themselves are revalidated by ``ETag`` each time.

Snapshots are made once a second for all listeners, each topic once. A listener has no queue: a slow one misses some and
receives the newest one next, so memory is bounded.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import Role
from headrace.api.errors import ApiError, invalid, permission_denied
from headrace.api.exchange import CALLER, Caller
from headrace.api.replies import SSE_HEADERS
from headrace.api.routing import Endpoints, route
from headrace.service.service import Service

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Time between two snapshots."""

MOST_LISTENERS = 100
"""Maximum number of streams at the same time."""


class Topic(NamedTuple):
    """The contents of a stream: a part in addition to the overview (empty: none), and the tenant (None: all)."""

    part: str
    tenant: str | None


class Snapshots(Protocol):
    """Makes snapshots: `observe.dashboard`."""

    def measure(self, now: float) -> None: ...

    def snapshot(self, part: str, tenant: str | None, now: float) -> Mapping[str, Any]: ...


class Broadcast:
    """Runs on the server's loop; ``snapshots`` are made there, after all events so far have been folded."""

    def __init__(self, service: Service, snapshots: Snapshots, seconds: float = SECONDS) -> None:
        self._service = service
        self._snapshots = snapshots
        self._seconds = seconds
        self._listeners: Counter[Topic] = Counter()
        self._newest: dict[Topic, bytes] = {}
        self._made = asyncio.Event()  # replaced at each round
        self._task: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        """Whether no further stream is accepted."""
        return self._listeners.total() >= MOST_LISTENERS

    @property
    def listening(self) -> bool:
        """Whether snapshots are being made."""
        return self._task is not None

    async def follow(self, topic: Topic) -> AsyncGenerator[bytes]:
        """Snapshots of a topic as server-sent events, the first one at once, until the server drains."""
        self._listeners[topic] += 1
        try:
            if self._task is None:
                self._measure()
                self._task = asyncio.create_task(self._run())
            if topic not in self._newest:
                self._newest[topic] = self._make(topic)
            while True:
                made = self._made
                yield self._newest[topic]
                await made.wait()
                if self._service.draining:
                    return
        finally:
            self._leave(topic)

    def _leave(self, topic: Topic) -> None:
        self._listeners[topic] -= 1
        if not self._listeners[topic]:
            del self._listeners[topic]
            self._newest.pop(topic, None)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                self._round()
            except Exception:
                logger.exception("no snapshot could be made")

    def _round(self) -> None:
        self._measure()
        for topic in self._listeners:
            self._newest[topic] = self._make(topic)
        made, self._made = self._made, asyncio.Event()
        made.set()

    def _measure(self) -> None:
        self._service.count()
        self._snapshots.measure(self._service.now())

    def _make(self, topic: Topic) -> bytes:
        snapshot = self._snapshots.snapshot(topic.part, topic.tenant, self._service.now())
        return b"data: " + json.dumps(snapshot, separators=(",", ":")).encode() + b"\n\n"


PARTS: Mapping[str, frozenset[Role]] = {
    "requests": frozenset({Role.INFERENCE, Role.ADMIN}),
    "caches": frozenset(Role),
    "tenants": frozenset(Role),
}
"""The parts of the stream in addition to the overview, and the roles that may see them."""

MOST_COUNT = 1_000_000


TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Content types by file extension; files with another extension are not served."""

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
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


class SnapshotStream(StreamingResponse):
    """Server-sent events whose source is closed as soon as the client has disconnected."""

    def __init__(self, snapshots: AsyncGenerator[bytes]) -> None:
        super().__init__(snapshots, headers=SSE_HEADERS, media_type="text/event-stream")
        self._snapshots = snapshots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._snapshots):
            await super().__call__(scope, receive, send)


class Pages(Endpoints):
    """The endpoints."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._assets = Assets()

    @route("GET /", Access.PUBLIC, "Links to the pages of this server.", listed=False)
    async def home(self, request: Request) -> Response:
        """Links to the server's pages and routes."""
        return self._asset("home.html", request)

    @route(
        "GET /dashboard",
        Access.PUBLIC,
        "The dashboard, and with `/{file}` its scripts and styles. It asks for a key.",
        listed=False,
    )
    async def dashboard(self, request: Request) -> Response:
        return self._asset("dashboard.html", request)

    @route("GET /chat", Access.PUBLIC)
    async def chat(self, request: Request) -> Response:
        return self._asset("chat.html", request)

    @route("GET /dashboard/{file}", Access.PUBLIC)
    async def file(self, request: Request) -> Response:
        """A script, a style sheet or an icon."""
        name = request.path_params["file"]
        return self._asset("" if name.endswith(".html") else name, request)

    @route(
        "GET /v1/dashboard/stream",
        Access.ANY_KEY,
        "Stream snapshots for the dashboard; ?part= adds requests, caches or tenants, ?count= ends after so many.",
    )
    async def stream(self, request: Request) -> Response:
        """One snapshot a second as server-sent events.

        ``?part=`` adds ``requests``, ``caches`` or ``tenants``. ``?count=`` limits the number of snapshots. An
        inference key sees its own tenant; a metrics key sees the whole server, but no single requests.
        """
        part, count = _part(request), _count(request)
        caller: Caller = request.scope[CALLER]
        if part and caller.role is not None and caller.role not in PARTS[part]:
            raise permission_denied(f"the part {part!r} needs an inference or admin key", "part")
        if self._broadcast.full:
            raise ApiError(503, f"{MOST_LISTENERS} dashboards are open already", code="too_many_dashboards")
        topic = Topic(part, caller.key_id if caller.role is Role.INFERENCE else None)
        return SnapshotStream(_first(self._broadcast.follow(topic), count))

    def _asset(self, name: str, request: Request) -> Response:
        response = self._assets.response(name, request.headers, request.query_params.get("v"))
        if response is None:
            raise ApiError(404, f"There is no page {request.url.path[:200]!r}.", code="page_not_found")
        return response


def _part(request: Request) -> str:
    part = request.query_params.get("part", "")
    if part and part not in PARTS:
        raise invalid(f"part must be one of {', '.join(PARTS)}, got {part[:40]!r}", "part")
    return part


def _count(request: Request) -> int:
    given = request.query_params.get("count", str(MOST_COUNT))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:10]) <= MOST_COUNT):
        raise invalid(f"count must be an integer from 1 to {MOST_COUNT:,}, got {given[:40]!r}", "count")
    return int(given)


async def _first(snapshots: AsyncGenerator[bytes], count: int) -> AsyncGenerator[bytes]:
    """The first ``count`` snapshots."""
    async with aclosing(snapshots):
        async for snapshot in snapshots:
            yield snapshot
            count -= 1
            if not count:
                return
