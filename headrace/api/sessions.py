"""``DELETE /v1/sessions/{id}``: ends a session, so that its prompt is no longer retained."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import tenant
from headrace.api.caller import CALLER, Caller
from headrace.api.compile.model import ServedModel
from headrace.api.errors import ApiError
from headrace.api.routing import Endpoints, route

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
