"""The pages' endpoints: the documents with their files, and the live stream, whose parts depend on the role.

The documents and files hold no data and need no key. The page asks for a key and sends it with each request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import Role
from headrace.api.caller import CALLER, Caller
from headrace.api.errors import ApiError, invalid, permission_denied
from headrace.api.pages.assets import Assets
from headrace.api.pages.broadcast import MOST_LISTENERS, Broadcast, Topic
from headrace.api.replies import SSE_HEADERS
from headrace.api.routing import Endpoints, route

PARTS: Mapping[str, frozenset[Role]] = {
    "requests": frozenset({Role.INFERENCE, Role.ADMIN}),
    "caches": frozenset(Role),
    "tenants": frozenset(Role),
}
"""The parts of the stream in addition to the overview, and the roles that may see them."""

MOST_COUNT = 1_000_000


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
