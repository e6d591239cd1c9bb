"""A tenant's own calls, found by id or ``X-Request-Id``: their sequences, their timeline, and their end by abort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import tenant
from headrace.api.body import typed_body
from headrace.api.compile.model import ServedModel
from headrace.api.errors import ApiError, invalid, request_not_found
from headrace.api.exchange import CALLER, Caller
from headrace.api.routing import Endpoints, route
from headrace.api.serving import CallNotes
from headrace.api.wire import Wire
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


FORMATS = ("json", "perfetto")


def read_format(request: Request) -> str:
    """The query's ``format``.

    Raises:
        ApiError: it is none of `FORMATS`.
    """
    form = request.query_params.get("format", "json")
    if form not in FORMATS:
        raise invalid(f"format must be json or perfetto, got {form[:40]!r}", "format")
    return form


def download(trace: Mapping[str, Any], name: str) -> Response:
    """A trace for Perfetto as a file; ``name`` has no extension."""
    safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in name)[:80]
    return JSONResponse(
        trace, headers={"Content-Disposition": f'attachment; filename="{safe}.perfetto.json"'}
    )


class RequestTimeline(Endpoints):
    """When a request waited, computed its prompt, and generated each token.

    ``explain``, ``timeline`` and ``trace`` come from `observe`: the explanation of a request, its timeline up to a
    time, and the timelines of requests as a trace.
    """

    def __init__(
        self,
        service: Service,
        notes: CallNotes,
        *,
        explain: Explain,
        timeline: Explain,
        trace: Callable[[Sequence[str], float], Mapping[str, Any]],
    ) -> None:
        self._service = service
        self._notes = notes
        self._explain = explain
        self._timeline = timeline
        self._trace = trace

    @route(
        "GET /v1/requests/{id}/timeline",
        Access.INFERENCE,
        "Report when a request waited, computed its prompt and generated each token; ?format=perfetto for a trace.",
    )
    async def timeline(self, request: Request) -> Response:
        """``?format=perfetto`` returns it for https://ui.perfetto.dev.

        With API keys, a request is shown only to its tenant. A timeline holds no text.
        """
        form = read_format(request)
        call = owned(request, self._service, self._notes, self._explain)
        now = self._service.now()
        if form == "perfetto":
            return download(self._trace([each["id"] for each in call.sequences], now), call.call_id)
        shown = []
        for each in call.sequences:
            known = {name: each[name] for name in ("id", "state", "cached_tokens", "preemptions", "cost")}
            shown.append({**known, **(self._timeline(each["id"], now) or {})})
        return JSONResponse(call.shown(shown))


class AbortBody(Wire):
    """The request to cancel."""

    request_id: str = Field(
        min_length=1,
        max_length=512,
        description="The `id` of the response, or the `X-Request-Id` of the request.",
    )


class Abort(Endpoints):
    """The endpoint. With API keys, a request is cancelled only by its own tenant."""

    def __init__(self, notes: CallNotes, *, max_body_bytes: int) -> None:
        self._notes = notes
        self._max_body_bytes = max_body_bytes

    @route(
        "POST /abort_request",
        Access.INFERENCE,
        "Cancel a running request, by its id or its X-Request-Id.",
        body=AbortBody,
    )
    async def abort(self, request: Request) -> Response:
        """The cancelled request ends with the error ``request_aborted``."""
        body = await typed_body(request, self._max_body_bytes, AbortBody, {})
        caller = request.scope[CALLER]
        key_id = caller.key_id
        call = self._notes.under_way(self._notes.find(body.request_id, key_id or caller.tenant_header))
        if call is None or (key_id is not None and call.tenant != key_id):
            raise request_not_found(body.request_id)
        call.abort()
        return JSONResponse({"request_id": body.request_id, "aborted": True})


MOST_SHOWN = 128
"""Maximum characters of an unknown id in an error."""


class SessionsApi(Endpoints):
    """The endpoint. A tenant releases only its own sessions."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    @route("DELETE /v1/sessions/{id}", Access.INFERENCE, "End a session: its prompt is retained no longer.")
    async def release(self, request: Request) -> Response:
        id = request.path_params["id"]
        caller: Caller = request.scope[CALLER]
        sessions = self._model.prompts.sessions
        tenant_name = tenant(caller.key_id, caller.tenant_header, None)
        if sessions is None or not sessions.release(tenant_name, id):
            raise ApiError(
                404, f"There is no session {id[:MOST_SHOWN]!r}.", param="id", code="session_not_found"
            )
        return JSONResponse({"id": id, "object": "session", "released": True})
