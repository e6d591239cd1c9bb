"""The endpoints: create, get, delete and cancel a response, and list its input items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.body import read_body
from headrace.serve.http.cache.question_recorder import QuestionRecorder
from headrace.serve.http.edge import CALLER
from headrace.serve.http.errors import ApiError, invalid
from headrace.serve.http.generation.call import Call, Caller, StoredFor
from headrace.serve.http.generation.call_notes import CallNotes
from headrace.serve.http.model import ServedModel
from headrace.serve.http.openai.chat import open_chat
from headrace.serve.http.prompts.policy import stored_name
from headrace.serve.http.replies import StreamedAnswer, WholeAnswer, writer_of
from headrace.serve.http.responses import resource
from headrace.serve.http.responses.background import BackgroundResponses
from headrace.serve.http.responses.conversation import chat_body, own_names
from headrace.serve.http.responses.items import Stored, stored_items
from headrace.serve.http.responses.kept_answer import KeptAnswer
from headrace.serve.http.responses.refusals import RESPONSES
from headrace.serve.http.responses.store import MAX_AGE_SECONDS, BrokenChain, Record, ResponseStore
from headrace.serve.http.responses.wire import ResponsesBody
from headrace.serve.http.responses.writer import ResponseWriter
from headrace.serve.http.wire import parse

MAX_PAGE = 100
PAGE = 20


class ResponsesApi:
    """The endpoints under one model, one road to its answers and one store.

    ``background`` is the work beside the server. ``max_body_bytes``, ``request_timeout``, ``headers`` and
    ``recorder`` are those of `serve.http.openai.routes.Api`.
    """

    def __init__(
        self,
        recall: CacheLookup,
        model: ServedModel,
        notes: CallNotes,
        store: ResponseStore,
        background: BackgroundResponses,
        *,
        max_body_bytes: int,
        request_timeout: float,
        headers: Callable[[str], Mapping[str, str]] = lambda tenant: {},
        recorder: QuestionRecorder | None = None,
    ) -> None:
        self._recall = recall
        self._model = model
        self._notes = notes
        self._store = store
        self.background = background
        self._max_body_bytes = max_body_bytes
        self._request_timeout = request_timeout
        self._headers = headers
        self._recorder = recorder

    def routes(self) -> list[Route]:
        """What to mount."""
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.get, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        self._recall.service.expect()
        body = parse(await read_body(request, self._max_body_bytes), ResponsesBody, RESPONSES)
        self._model.check_name(body.model)
        _check(body)
        caller: Caller = request.scope[CALLER]
        items = stored_items(body.input)
        context = await self._context(caller, body.previous_response_id)
        with own_names():
            chat = chat_body(body, context, items)
            if self._recorder is not None:
                caller = self._recorder.note_chat(chat, caller)
            if body.stored:
                caller = caller._replace(stored=StoredFor(MAX_AGE_SECONDS, body.previous_response_id))
            call = await open_chat(
                self._recall, self._model, chat, caller, self._request_timeout, id_prefix="resp_"
            )
        writer = writer_of(call, lambda: ResponseWriter(call, body, self._keeper(call, body, items)))
        self._notes.put(call, body.metadata)
        headers = self._headers(call.tenant)
        if body.background:
            response = writer.response("queued")
            self._store.put(Record(call.tenant, items, response))
            self.background.begin(call, writer)
            await self._store.written()
            return JSONResponse(response, headers=dict(headers))
        made = StreamedAnswer if body.stream else WholeAnswer
        answer = made(call, writer, headers)
        return KeptAnswer(answer, self._store) if body.stored else answer

    async def get(self, request: Request) -> Response:
        """``GET /v1/responses/{id}``."""
        if request.query_params.get("stream", "false") != "false":
            raise invalid("A stored response cannot be streamed.", "stream", "unsupported_parameter")
        return JSONResponse((await self._record(request)).response)

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/responses/{id}``; a response under way is cancelled first."""
        record = await self._record(request)
        id = record.response["id"]
        await self.background.cancel(id)
        await self._store.delete(record.tenant, id)
        if self._model.prompts.sessions is not None:
            self._model.prompts.sessions.release(record.tenant, stored_name(id))
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/responses/{id}/cancel``: the response as it is after that."""
        record = await self._record(request)
        if not record.response["background"]:
            raise invalid("Only a response with background true can be cancelled.", "id")
        if record.response["status"] in resource.ENDED:
            return JSONResponse(record.response)
        await self.background.cancel(record.response["id"])
        return JSONResponse((await self._record(request)).response)

    async def input_items(self, request: Request) -> Response:
        """``GET /v1/responses/{id}/input_items``: what the request sent, without earlier responses."""
        limit, newest_first, after = _page(request.query_params)
        items = (await self._record(request)).input
        if newest_first:
            items = items[::-1]
        if after is not None:
            at = next((at for at, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise invalid(f"after: there is no input item {after[:64]!r}", "after")
            items = items[at + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})

    async def _context(self, caller: Caller, previous: str | None) -> list[Stored]:
        """The items of the responses that a request continues."""
        if previous is None:
            return []
        try:
            records = await self._store.chain(_owner(caller), previous)
        except BrokenChain as broken:
            raise _previous_not_found(previous, str(broken)) from None
        status = records[-1].response["status"]
        if status not in ("completed", "incomplete"):
            raise invalid(
                f"The response {previous!r} cannot be continued: it is {status}.", "previous_response_id"
            )
        return [item for record in records for item in (*record.input, *record.response["output"])]

    async def _record(self, request: Request) -> Record:
        id = request.path_params["id"]
        record = await self._store.get(_owner(request.scope[CALLER]), id)
        if record is None:
            raise ApiError(404, f"There is no response {id[:256]!r}.", param="id", code="response_not_found")
        return record

    def _keeper(
        self, call: Call, body: ResponsesBody, items: list[Stored]
    ) -> Callable[[dict[str, Any]], None]:
        return partial(self._keep, call.tenant, items) if body.stored else lambda response: None

    def _keep(self, tenant: str, items: Sequence[Stored], response: dict[str, Any]) -> None:
        self._store.put(Record(tenant, list(items), response))


def _owner(caller: Caller) -> str | None:
    """The tenant whose responses a request sees; None without a key and without ``X-Tenant-Id``: all."""
    return caller.key_id or caller.tenant_header


def _check(body: ResponsesBody) -> None:
    """Raise `ApiError` 400 where fields contradict each other."""
    if body.background and not body.stored:
        raise invalid("background needs store to be true", "background")
    if body.background and body.stream:
        raise invalid("background and stream cannot be used together", "background", "unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream to be true", "stream_options")


def _previous_not_found(asked: str, missing: str) -> ApiError:
    why = "" if asked == missing else f", because {missing[:256]!r}, which it continues, is not stored"
    message = (
        f"The previous response {asked!r} cannot be continued{why}."
        if why
        else (f"There is no response {asked!r}.")
    )
    return ApiError(404, message, param="previous_response_id", code="previous_response_not_found")


def _page(query: Mapping[str, str]) -> tuple[int, bool, str | None]:
    """The length of a page, whether the newest items come first, and the item before the page."""
    if unknown := sorted(query.keys() - {"limit", "order", "after"}):
        raise invalid(f"Unknown parameter: {unknown[0][:64]!r}.", unknown[0][:64], "unknown_parameter")
    limit = query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise invalid(f"limit must be an integer from 1 to {MAX_PAGE}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be 'asc' or 'desc'", "order")
    return int(limit), order == "desc", query.get("after")
