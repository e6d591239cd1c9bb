"""The client of a call, as headers and API key name it."""

from __future__ import annotations

from typing import NamedTuple

from headrace.api.auth.api_keys import Role, tenant
from headrace.api.exchange import Exchange

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

    def tenant(self, user: str | None = None) -> str:
        """The tenant that a call is accounted to; ``user`` is the field of its body."""
        return tenant(self.key_id, self.tenant_header, user)
