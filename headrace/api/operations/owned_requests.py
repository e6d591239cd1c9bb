"""Finds the engine's requests of a call by its id or its ``X-Request-Id``, with the check that the tenant owns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request

from headrace.api.caller import CALLER
from headrace.api.errors import request_not_found
from headrace.api.serving import CallNotes
from headrace.service.service import Service

Explain = Callable[[str, float], Mapping[str, Any] | None]
"""Explains a request by its id at a time; None if it is unknown."""


class Owned(NamedTuple):
    """A call: its id, its metadata, and the explanation of each of its sequences."""

    call_id: str
    metadata: dict[str, str]
    sequences: list[dict[str, Any]]
    single: bool

    def shown(self, sequences: list[dict[str, Any]]) -> dict[str, Any]:
        """The sequences as one JSON object: the only one, or the call's id with the list of all."""
        return sequences[0] if self.single else {"id": self.call_id, "sequences": sequences}


def owned(request: Request, service: Service, notes: CallNotes, explain: Explain) -> Owned:
    """The call that the path names. With API keys, a call is found only by its tenant, or by an administrator.

    Raises:
        ApiError: there is no such call, or it is another tenant's (404).
    """
    given = request.path_params["id"]
    caller = request.scope[CALLER]
    call_id = notes.find(given, caller.key_id or caller.tenant_header)
    note = notes.get(call_id)
    service.count()
    now = service.now()
    known = [explain(request_id, now) for request_id in note.request_ids]
    found = [dict(each) for each in known if each is not None]
    key_id = caller.key_id
    if not found or (key_id is not None and any(each["tenant"] != key_id for each in found)):
        raise request_not_found(given)
    return Owned(call_id, note.metadata, found, len(note.request_ids) == 1)
