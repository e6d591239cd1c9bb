"""What all endpoints that generate share: the model, the caches, the limits, and the calls that run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from headrace.api.cache.recorder import RequestRecorder
from headrace.api.compile.call import Lookups
from headrace.api.compile.model import ServedModel
from headrace.api.exchange import Exchange

MOST_NOTES = 1000
"""Most calls with metadata or several sequences that are remembered."""


MOST_NAMES = 20_000
"""Most names of calls that are remembered: each call has one for its tenant and one for all tenants."""


class CallNote(NamedTuple):
    """One call: the engine's ids of its sequences, and the metadata that the client sent."""

    request_ids: tuple[str, ...]
    metadata: dict[str, str]


class NotedCall(Protocol):
    """A call that can be found by its id and ended: `compile.call.Call`, or a call of a front end."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def request_ids(self) -> tuple[str, ...]: ...

    @property
    def settled(self) -> bool: ...

    def abort(self) -> None: ...


class CallNotes:
    """The latest calls. If an id is used twice, it names the newest call."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, CallNote] = OrderedDict()
        self._calls: WeakValueDictionary[str, NotedCall] = WeakValueDictionary()
        # By request id and tenant the newest call; the tenant None stands for any.
        self._names: OrderedDict[tuple[str, str | None], str] = OrderedDict()

    def name(self, exchange: Exchange) -> None:
        """Remember the request id of an HTTP request that opened a call; a hook of `Exchange`."""
        for tenant in (exchange.tenant, None):
            self._names[exchange.request_id, tenant] = exchange.call_id
            self._names.move_to_end((exchange.request_id, tenant))
        while len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    def find(self, given: str, tenant: str | None) -> str:
        """The id of the call that ``given`` names for ``tenant`` (None: for any tenant): a request id, or its own."""
        return self._names.get((given, tenant), given)

    def put(self, call: NotedCall, metadata: dict[str, str] | None) -> None:
        """Remember a call, in place of an older one with the same id."""
        self._calls[call.id] = call
        self._notes.pop(call.id, None)
        if metadata or len(call.request_ids) > 1:
            self._notes[call.id] = CallNote(call.request_ids, metadata or {})
            if len(self._notes) > MOST_NOTES:
                self._notes.popitem(last=False)

    def get(self, call_id: str) -> CallNote:
        """The note of a call. An unknown call has one sequence with the same id."""
        return self._notes.get(call_id) or CallNote((call_id,), {})

    def under_way(self, call_id: str) -> NotedCall | None:
        """The call with this id, while it runs."""
        call = self._calls.get(call_id)
        return None if call is None or call.settled else call


def no_headers(tenant: str, model: str) -> Mapping[str, str]:
    """No headers for any tenant."""
    return {}


@dataclass(frozen=True, slots=True)
class Serving:
    """One model with its caches, and the limits of a request.

    ``max_body_bytes`` limits a request's body, ``request_timeout`` (seconds) its duration. ``headers`` returns the
    headers of every response to a tenant, of the model with this name. ``recorder`` records repeated prompts in the
    history.
    """

    lookup: Lookups
    model: ServedModel
    notes: CallNotes
    max_body_bytes: int
    request_timeout: float
    headers: Callable[[str, str], Mapping[str, str]] = no_headers
    recorder: RequestRecorder | None = None
