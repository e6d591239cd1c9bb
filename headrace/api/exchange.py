"""One HTTP request and its response, as access log, metrics and traces see it; and the client of its call.

`edge` creates an `Exchange` for each HTTP request and fills it in as it proceeds; `compile.call` adds the API call.
Hooks are called when it begins, when its call is opened, and when it ends. It holds no body, no header and no key.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.datastructures import Headers

from headrace.api.auth.api_keys import Role, tenant

EXCHANGE = "headrace.exchange"
"""The key of the `Exchange` in an ASGI scope."""

SEND = "headrace.send"
"""The key of the server's own ``send`` in an ASGI scope. Streams use it for their body, which no layer looks at."""

PARTS = "headrace.parts"
"""The key of the `ResponseParts` of a response in an ASGI scope, where the server has them."""

DISCONNECTED = "client_disconnected"
"""The error code of an exchange whose client closed the connection before the response was complete."""

UNMATCHED = "unmatched"
"""The route of a request that no route matches: its path is arbitrary, so it is not used as a label."""

MOST_PATH = 200
"""Characters of a path that are kept."""

HEADER_TEXT = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
"""1 to 128 printable ASCII characters, without spaces at the ends."""

ResultT = TypeVar("ResultT")

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Disconnected(Exception):
    """The client closed the connection before its request was answered, so nothing is sent."""


class Turn(Protocol):
    """What a response does in its turn."""

    def turn(self) -> None:
        """Write what is due. It does not raise."""
        ...


class ResponseParts(Protocol):
    """Writes parts of a streamed response at once, without an ASGI message for each.

    ``ready``: a part may be written now. ``sent`` counts the bytes of all parts.
    """

    ready: bool
    sent: int

    def update(self) -> None:
        """Find out whether a part may be written, after the response has written anything by other means."""
        ...

    def write(self, part: bytes) -> None:
        """Write a part, while ``ready``."""
        ...

    def soon(self, turn: Turn) -> None:
        """Give ``turn`` its turn in the next iteration of the loop, with those of the other responses."""
        ...

    async def join(self, sending: Awaitable[None]) -> None:
        """Await what sends the head of the response and its first part, and write both at once."""
        ...

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` soon after the client has disconnected, until `unwatch`."""
        ...

    def unwatch(self) -> None:
        """The response is written."""
        ...


class AnsweredCall(Protocol):
    """What an exchange shows of its API call."""

    @property
    def stream(self) -> bool: ...

    @property
    def cache_note(self) -> str: ...

    @property
    def first_token_at(self) -> float | None: ...

    @property
    def finish_reasons(self) -> list[str]: ...

    @property
    def service_class(self) -> str: ...

    def cost(self) -> Mapping[str, Any]: ...

    def tokens(self) -> dict[str, Any]: ...


class Exchange:
    """One HTTP request.

    ``request_id`` is the client's ``X-Request-Id``, or a new one. ``traceparent`` is the W3C trace context that the
    response carries; empty if the client sent none and no trace is made. ``parent_id`` is the span above the one that
    is made of this request (empty: there is none above it; None: no span is made). ``began`` and ``ended`` are
    monotonic times.
    ``tenant``, ``call_id`` and ``request_ids`` (the engine's, one for each sequence) are known once a call is opened,
    ``call`` once it is admitted. ``received_bytes`` and ``sent_bytes`` count bodies. ``status`` is 0 until the
    response begins. ``error`` is the code of an API error.
    """

    __slots__ = (
        *("began", "call", "call_id", "ended", "error", "hooks", "method", "model", "path", "request_id"),
        *(
            "_parts",
            "parent_id",
            "received_bytes",
            "request_ids",
            "route",
            "sent_bytes",
            "status",
            "tenant",
            "traceparent",
        ),
    )

    def __init__(self, scope: MutableMapping[str, Any], headers: Headers, began: float, hooks: Hooks) -> None:
        given = headers.get("x-request-id", "")
        self.request_id = given if HEADER_TEXT.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        trace = headers.get("traceparent", "")
        self.traceparent = trace if _TRACEPARENT.fullmatch(trace) else ""
        self.parent_id: str | None = None
        self.method: str = scope["method"]
        self.path: str = scope["path"][:MOST_PATH]
        self.route = UNMATCHED
        self.began = self.ended = began
        self.status = 0
        self.received_bytes = self.sent_bytes = 0
        self.error = ""
        self.tenant = ""
        self.model = ""
        self.call_id = ""
        self.request_ids: tuple[str, ...] = ()
        self.call: AnsweredCall | None = None
        self.hooks = hooks
        self._parts: ResponseParts | None = scope.get(PARTS)

    def opened(self, call_id: str, model: str, tenant: str, request_ids: Sequence[str]) -> None:
        """An API call is about to be admitted."""
        self.call_id, self.model, self.tenant = call_id, model, tenant
        self.request_ids = tuple(request_ids)
        for hook in self.hooks.opened:
            hook(self)

    async def while_connected(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What ``work`` returns or raises. It is cancelled when the client disconnects, where the server can see that.

        Raises:
            Disconnected: the client has disconnected.
        """
        if self._parts is None:
            return await work
        task, gone = asyncio.ensure_future(work), False

        def leave() -> None:
            nonlocal gone
            gone = task.cancel()

        self._parts.watch(leave)
        try:
            return await task
        except asyncio.CancelledError:
            if gone:
                raise Disconnected from None
            raise
        finally:
            self._parts.unwatch()

    @property
    def trace_id(self) -> str:
        """The id of its trace; empty if there is none."""
        return self.traceparent.split("-")[1] if self.traceparent else ""


Hook = Callable[[Exchange], None]


class Hooks(NamedTuple):
    """What is called with an exchange when it begins, when its call is opened, and when it ends.

    What is ``stopped`` is called at the end of the application.
    """

    begun: tuple[Hook, ...] = ()
    opened: tuple[Hook, ...] = ()
    ended: tuple[Hook, ...] = ()
    stopped: tuple[Callable[[], None], ...] = ()


def record_error(scope: MutableMapping[str, Any], code: str | None) -> None:
    """Note the code of the error that a request ends with; the first one counts."""
    exchange = scope.get(EXCHANGE)
    if exchange is not None and not exchange.error:
        exchange.error = code or "error"


CALLER = "headrace.caller"
"""The key of the `Caller` in an ASGI scope."""


COST_HEADER = "X-Headrace-Cost"
"""In a request, ``true`` asks for the cost of the call; in its whole response, the cost."""


class StoredFor(NamedTuple):
    """The response of a call is stored for ``seconds``; it continues the stored response ``previous``."""

    seconds: float
    previous: str | None


class Caller(NamedTuple):
    """The client of a call: the API key's tenant or public id, ``X-Tenant-Id``, and ``Cache-Control``.

    ``origin`` names the call in the history of prompts, if there is one. ``exchange`` is the HTTP request of the call,
    None where the server makes the call itself. ``service_class`` is set where the server chooses the class, as for
    lines of a batch. ``asks_cost``: the header ``X-Headrace-Cost`` asks for the cost of the call. ``session`` is
    ``X-Session-Id``. ``stored`` says how the response of the call is stored, if it is. ``role`` is the key's, None
    without a key.
    """

    key_id: str | None
    tenant_header: str | None
    cache_control: str | None = None
    origin: bytes = b""
    exchange: Exchange | None = None
    service_class: str = ""
    asks_cost: bool = False
    session: str | None = None
    stored: StoredFor | None = None
    role: Role | None = None

    async def while_connected(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What ``work`` returns or raises; see `Exchange.while_connected`. The server's own calls have no client."""
        return await (work if self.exchange is None else self.exchange.while_connected(work))

    def tenant(self, user: str | None = None) -> str:
        """The tenant that a call is accounted to; ``user`` is the field of its body."""
        return tenant(self.key_id, self.tenant_header, user)
