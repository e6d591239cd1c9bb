"""The endpoints: create, get, delete and cancel a response, and list its input items.

A response with ``background: true`` is computed while no client waits, and stored when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import typed_body
from headrace.api.compile.call import Call
from headrace.api.compile.policies import stored_name
from headrace.api.compile.submit import count_chat, open_chat
from headrace.api.errors import ApiError, failed, invalid, not_stored, shutting_down
from headrace.api.exchange import CALLER, Caller, StoredFor
from headrace.api.replies import FEW_TOKENS, StreamedAnswer, WholeAnswer, write_beside, writer_of, written
from headrace.api.responses.conversation import chat_body, fitted, own_names
from headrace.api.responses.items import (
    CompactBody,
    Stored,
    chat_messages,
    is_rule,
    references,
    stored_items,
    summary_request,
)
from headrace.api.responses.output import ENDED
from headrace.api.responses.store import (
    MAX_AGE_SECONDS,
    BrokenChain,
    EventLog,
    FollowedStream,
    Record,
    ResponseStore,
)
from headrace.api.responses.wire import INPUT_TOKENS, RESPONSES, InputTokensBody, ResponsesBody
from headrace.api.responses.writer import CompactionWriter, KeptAnswer, ResponseWriter
from headrace.api.routing import Endpoints, route
from headrace.api.serving import Serving
from headrace.api.wire import read_page
from headrace.config import ConfigError, ServerOptions
from headrace.core.request import FinishReason

ID_PREFIX = "resp_"
"""Begins the id of every response."""


COMPACTED = ("model", "prompt_cache_key", "prompt_cache_retention", "request_id", "service_tier")
"""Fields of a compaction request that are copied to the request for its summary."""


MAX_PAGE = 100
PAGE = 20


class Opened(NamedTuple):
    """A response that is being computed: its call and writer, its input, and the log of its events if it has one."""

    call: Call
    writer: ResponseWriter
    items: list[Stored]
    log: EventLog | None


class ResponsesApi(Endpoints):
    """The endpoints and their store; ``background`` is a `api.app.BackgroundWork`."""

    def __init__(self, serving: Serving, store: ResponseStore, background: BackgroundResponses) -> None:
        self._serving = serving
        self._lookup, self._model = serving.lookup, serving.model
        self._store = store
        self.background = background

    @route(
        "POST /v1/responses",
        Access.INFERENCE,
        "Create a response (OpenAI's Responses API).",
        body=ResponsesBody,
        example={"input": "Tell me a short story.", "max_output_tokens": 200, "stream": True},
    )
    async def create(self, request: Request) -> Response:
        self._lookup.expect()
        body = await typed_body(request, self._serving.max_body_bytes, ResponsesBody, RESPONSES)
        call, writer, items, log = await self.open(body, request.scope[CALLER])
        headers = self._serving.headers(call.tenant, call.model_name)
        if body.background:
            response = writer.response("queued")
            stored = self._store.put(Record(call.tenant, items, response))
            self.background.begin(call, writer, log)
            if not await asyncio.wrap_future(stored):
                await self.background.cancel(call.id)
                raise not_stored()
            return (
                JSONResponse(response, headers=dict(headers))
                if log is None
                else FollowedStream(log, 0, headers)
            )
        made = StreamedAnswer if body.stream else WholeAnswer
        answer = made(call, writer, headers)
        return KeptAnswer(answer, writer) if body.stored else answer

    async def open(self, body: ResponsesBody, caller: Caller) -> Opened:
        """Submit a request for a response.

        Raises:
            ApiError: the request is invalid, or the server rejects it.
        """
        self._model.check_name(body.model)
        _check(body)
        if body.stored and body.request_id is not None:
            await self._check_new(body.request_id)
        items = stored_items(body.input, await self._referred(caller, references(body.input)))
        context = await self._context(caller, body.previous_response_id)
        with own_names(body.tools or (), items):
            chat, compacted = await fitted(self._serving, body, caller, [*context, *items])
            if self._serving.recorder is not None:
                caller = self._serving.recorder.note_chat(chat, caller)
            if body.stored:
                caller = caller._replace(stored=StoredFor(MAX_AGE_SECONDS, body.previous_response_id))
            call = await open_chat(
                self._lookup,
                self._model,
                chat,
                caller,
                self._serving.request_timeout,
                id_prefix=ID_PREFIX,
                reports_begin=bool(body.background),
            )
        log = EventLog() if body.stream and body.stored else None
        keep = partial(self._keep, call.tenant, items, log) if body.stored else None
        writer = writer_of(call, lambda: ResponseWriter(call, body, keep, log, compacted))
        self._serving.notes.put(call, body.metadata)
        return Opened(call, writer, items, log)

    async def written(self) -> None:
        """Wait until all responses are stored."""
        await self._store.written()

    @route(
        "POST /v1/responses/compact",
        Access.INFERENCE,
        "Compact a conversation into one item that replaces it.",
        body=CompactBody,
        example={"model": "builtin", "input": "Tell me a short story."},
    )
    async def compact(self, request: Request) -> Response:
        """A conversation as one item with a summary that the model writes."""
        self._lookup.expect()
        body = await typed_body(request, self._serving.max_body_bytes, CompactBody, {})
        self._model.check_name(body.model)
        caller: Caller = request.scope[CALLER]
        given = body.input or []
        items = stored_items(given, await self._referred(caller, references(given)))
        context = await self._context(caller, body.previous_response_id)
        with own_names():
            asked = {name: getattr(body, name) for name in COMPACTED}
            chat = summary_request(chat_messages([*context, *items]), body.instructions, asked)
            call = await open_chat(
                self._lookup,
                self._model,
                chat,
                caller,
                self._serving.request_timeout,
                id_prefix=ID_PREFIX,
                shorten=True,
            )
        writer = writer_of(call, lambda: CompactionWriter(call, [*filter(is_rule, [*context, *items])]))
        self._serving.notes.put(call, None)
        return WholeAnswer(call, writer, self._serving.headers(call.tenant, call.model_name))

    @route(
        "POST /v1/responses/input_tokens",
        Access.INFERENCE,
        "Count the tokens of a response request's prompt.",
        body=InputTokensBody,
        example={"input": "Tell me a short story."},
    )
    async def input_tokens(self, request: Request) -> Response:
        """The tokens of a request's prompt."""
        body = await typed_body(request, self._serving.max_body_bytes, InputTokensBody, INPUT_TOKENS)
        self._model.check_name(body.model)
        caller: Caller = request.scope[CALLER]
        given = body.input or []
        items = stored_items(given, await self._referred(caller, references(given)))
        context = await self._context(caller, body.previous_response_id)
        with own_names(body.tools or (), items):
            count = await count_chat(self._model, chat_body(body.response(), [*context, *items]), caller)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    @route(
        "GET /v1/responses/{id}",
        Access.INFERENCE,
        "Return a stored response; ?stream=true replays its events, from ?starting_after= on.",
    )
    async def get(self, request: Request) -> Response:
        """The response, or with ``stream=true`` the events of its stream."""
        query = request.query_params
        stream, after = query.get("stream", "false"), query.get("starting_after")
        if stream not in ("true", "false"):
            raise invalid("stream must be true or false", "stream")
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
            raise invalid("starting_after must be a whole number, at least 0", "starting_after")
        if stream == "false":
            if after is not None:
                raise invalid("starting_after needs stream to be true", "starting_after")
            shown = await self._store.shown(_owner(request.scope[CALLER]), request.path_params["id"])
            if shown is None:
                raise _not_found(request)
            return Response(shown, media_type="application/json")
        record = await self._record(request)
        id = record.response["id"]
        log = self.background.log(id)
        if log is None and (packed := await self._store.events(id)) is not None:
            log = EventLog.of(packed)
        if log is None:
            why = f"The response {id!r:.200} has no stored stream: it was created without stream true, or did not end."
            raise invalid(why, "stream", "no_stored_stream")
        seen = 0 if after is None else int(after) + 1
        return FollowedStream(log, seen, self._serving.headers(record.tenant, record.response["model"]))

    @route("DELETE /v1/responses/{id}", Access.INFERENCE, "Delete a stored response.")
    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/responses/{id}``; a running response is cancelled first."""
        record = await self._record(request)
        id = record.response["id"]
        await self.background.cancel(id)
        await self._store.delete(record.tenant, id)
        if self._model.prompts.sessions is not None:
            self._model.prompts.sessions.release(record.tenant, stored_name(id))
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    @route(
        "POST /v1/responses/{id}/cancel", Access.INFERENCE, "Cancel a response that runs in the background."
    )
    async def cancel(self, request: Request) -> Response:
        """The cancelled response."""
        record = await self._record(request)
        if not record.response["background"]:
            raise invalid("Only a response with background true can be cancelled.", "id")
        if record.response["status"] in ENDED:
            return await _json(record.response)
        await self.background.cancel(record.response["id"])
        return await _json((await self._record(request)).response)

    @route(
        "GET /v1/responses/{id}/input_items",
        Access.INFERENCE,
        "List the input items of a stored response; ?limit=, ?order= and ?after= select a page.",
    )
    async def input_items(self, request: Request) -> Response:
        """What the request sent, without earlier responses."""
        query = request.query_params
        if unknown := sorted(query.keys() - {"limit", "order", "after"}):
            raise invalid(f"Unknown parameter: {unknown[0][:64]!r}.", unknown[0][:64], "unknown_parameter")
        limit, newest_first, after = read_page(query, PAGE, MAX_PAGE)
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
        return await _json({"object": "list", "data": page, **ends, "has_more": len(items) > limit})

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
                f"The response {previous!r:.200} cannot be continued: it is {status}.", "previous_response_id"
            )
        return [item for record in records for item in (*record.input, *record.response["output"])]

    async def _record(self, request: Request) -> Record:
        record = await self._store.get(_owner(request.scope[CALLER]), request.path_params["id"])
        if record is None:
            raise _not_found(request)
        return record

    async def _referred(self, caller: Caller, ids: Mapping[str, int]) -> dict[str, Stored]:
        """The stored items with these ids; the values of ``ids`` are their indices in the input."""
        found = {}
        for id, at in ids.items():
            item = await self._store.item(_owner(caller), id)
            if item is None:
                message = f"There is no stored item {id!r:.200}."
                raise ApiError(404, message, param=f"input[{at}].id", code="item_not_found")
            found[id] = item
        return found

    async def _check_new(self, request_id: str) -> None:
        """Raise `ApiError` 400 if a response with this id is stored, of any tenant."""
        if await self._store.get(None, f"{ID_PREFIX}{request_id}") is not None:
            raise invalid(
                f"request_id {request_id!r:.200} is already in use by a stored response", "request_id"
            )

    def _keep(
        self, tenant: str, items: list[Stored], log: EventLog | None, response: dict[str, Any]
    ) -> Future[bool]:
        events = log.packed() if log is not None and log.ended else None
        return self._store.put(Record(tenant, items, response, events))


async def _json(value: Any) -> Response:
    """A response object or a page of items: a stored conversation takes long to write."""
    return Response(await asyncio.to_thread(written, value), media_type="application/json")


def _not_found(request: Request) -> ApiError:
    id = request.path_params["id"]
    return ApiError(404, f"There is no response {id[:256]!r}.", param="id", code="response_not_found")


def _owner(caller: Caller) -> str | None:
    """The tenant whose responses a request may read; None (all) without a key and without ``X-Tenant-Id``."""
    return caller.key_id or caller.tenant_header


def _check(body: ResponsesBody) -> None:
    """Raise `ApiError` 400 if fields contradict each other."""
    if body.background and not body.stored:
        raise invalid("background needs store to be true", "background")
    if body.background and body.context_management:
        raise invalid("context_management cannot be used with background", "context_management")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream to be true", "stream_options")


def _previous_not_found(asked: str, missing: str) -> ApiError:
    why = "" if asked == missing else f", because {missing[:256]!r}, which it continues, is not stored"
    message = (
        f"The previous response {asked!r:.200} cannot be continued{why}."
        if why
        else (f"There is no response {asked!r:.200}.")
    )
    return ApiError(404, message, param="previous_response_id", code="previous_response_not_found")


def open_responses(options: ServerOptions, serving: Serving) -> ResponsesApi:
    """The endpoints, with their open store.

    Raises:
        ConfigError: the store's file cannot be used.
    """
    path = None if options.response_store is None else Path(options.response_store)
    try:
        store = ResponseStore(path, options.response_store_bytes)
    except OSError as error:
        raise ConfigError(f"--response-store: {error}") from error
    return ResponsesApi(serving, store, BackgroundResponses(store))


logger = logging.getLogger(__name__)


class Running:
    """A running response: its call, its writer, and the log of its events, if it is streamed."""

    def __init__(self, call: Call, writer: ResponseWriter, log: EventLog | None) -> None:
        self.cancelled = False
        self.log = log
        self._call = call
        self._writer = writer
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """End the call; its status becomes ``cancelled`` if it has not ended already."""
        self.cancelled = True
        self._call.abort()

    def stop(self) -> None:
        """End the call because the server ends."""
        self._call.close(FinishReason.CANCELLED)

    async def _run(self) -> None:
        try:
            await (self._compute() if self.log is None else self._stream())
        except ApiError as error:
            self._fail(error, "cancelled" if self.cancelled else "failed")
        except asyncio.CancelledError:
            self._fail(shutting_down(), "failed")
            raise
        except Exception:
            logger.exception("call failed", extra={"fields": {"id": self._call.id}})
            self._fail(failed(), "failed")
        finally:
            self._call.close()

    async def _compute(self) -> None:
        await self._call.advance()
        if not self._call.done:
            self._writer.began()
        while not self._call.done:
            await self._call.advance()
        await write_beside(self._call, self._writer.complete)

    async def _stream(self) -> None:
        """Write the events into the log, which clients follow."""
        call, writer = self._call, self._writer
        writer.queued()
        begun = ended = False
        while not call.done:
            for choice in await call.advance():
                if not begun:
                    writer.began()
                    begun = True
                if (delta := choice.gained()) is not None:
                    write = partial(writer.chunk, choice, delta)
                    write() if len(delta.tokens) < FEW_TOKENS else await write_beside(call, write)
                if choice.finish_reason is not None and not ended:
                    await write_beside(call, partial(writer.ending, choice))
                    ended = True
        await write_beside(call, writer.closing)

    def _fail(self, error: ApiError, status: str) -> None:
        if self.log is None:
            self._writer.failed(error, status)
        else:
            self._writer.failure(error, status)


class BackgroundResponses:
    """The responses that run in the background. When the server stops, it ends them and closes their store
    (`api.app.BackgroundWork`)."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, Running] = {}

    def begin(self, call: Call, writer: ResponseWriter, log: EventLog | None = None) -> None:
        """Compute an open call; ``log`` is its writer's, if it is streamed."""
        running = self._running[call.id] = Running(call, writer, log)
        running.task.add_done_callback(lambda _: self._running.pop(call.id, None))

    def log(self, id: str) -> EventLog | None:
        """The events of a running response, if it is streamed."""
        running = self._running.get(id)
        return None if running is None else running.log

    async def cancel(self, id: str) -> None:
        """End a response, if it is running, and wait until its final state is stored."""
        running = self._running.get(id)
        if running is not None:
            running.cancel()
            await asyncio.wait([running.task])

    def start(self) -> None:
        """Do nothing: work begins with the first request."""

    async def stop(self) -> None:
        """End all responses, write what is pending, and close the store."""
        running = list(self._running.values())
        for each in running:
            each.stop()
        if running:
            await asyncio.wait([each.task for each in running])
        self._store.close()
