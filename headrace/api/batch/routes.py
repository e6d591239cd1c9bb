"""``/v1/files`` and ``/v1/batches``, in OpenAI's format. A tenant reaches only its own files and batches."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import tenant
from headrace.api.batch.batches import Batches, Bounds
from headrace.api.batch.line_runner import LineEndpoints, LineRunner
from headrace.api.batch.lines import ENDPOINTS
from headrace.api.batch.store import (
    BatchRecord,
    BatchStatus,
    FileInUse,
    FileRecord,
    Limits,
    NotFound,
    QuotaExceeded,
    window_seconds,
)
from headrace.api.batch.upload import ExpiresAfter, UploadForm, receive
from headrace.api.body import parse, read_body, typed_body
from headrace.api.compile.fields import MetadataField
from headrace.api.errors import ApiError, invalid
from headrace.api.exchange import CALLER, Caller
from headrace.api.routing import FORM, Endpoints, route
from headrace.api.wire import NotYet, Wire, read_page
from headrace.config import BatchOptions, ConfigError, ServerOptions
from headrace.service.service import Service
from headrace.service.takeover import when_free

MAX_LISTED_FILES = 10_000
"""Maximum and default number of files in a page, as at OpenAI."""

MAX_LISTED = 100
LISTED = 20
MAX_BODY_BYTES = 64 << 10
NOT_YET: NotYet = {}


class BatchBody(Wire):
    """The body of ``POST /v1/batches``."""

    input_file_id: str = Field(max_length=128, description="Id of an uploaded file with the purpose batch.")
    endpoint: str = Field(max_length=128, description="Endpoint that all lines of the file use.")
    completion_window: str = Field(
        max_length=16,
        description="Time until the batch expires: 24h, or other minutes, hours or days (30m, 7d).",
    )
    metadata: MetadataField = Field(None, description="Stored with the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="Lifetime of the output and the error file; default: until they are deleted."
    )


class CancelBody(Wire):
    """The body of ``POST /v1/batches/{id}/cancel``: it has no fields."""


def tenant_of(request: Request) -> str:
    """The tenant that sends a request; the field ``user`` of lines does not count."""
    caller: Caller = request.scope[CALLER]
    return tenant(caller.key_id, caller.tenant_header, None)


class Files(Endpoints):
    """The endpoint."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @route(
        "POST /v1/files",
        Access.INFERENCE,
        "Upload a file of requests for a batch. All file routes need the server's option --batch-path.",
        body=UploadForm,
        media=FORM,
    )
    async def upload(self, request: Request) -> Response:
        return JSONResponse(file_object(await receive(request, self._batches, tenant_of(request))))

    @route("GET /v1/files", Access.INFERENCE, "List the tenant's files. Query: purpose, after, limit, order.")
    async def list(self, request: Request) -> Response:
        limit, newest_first, after = read_page(request.query_params, MAX_LISTED_FILES, MAX_LISTED_FILES)
        with found("file", after or "", "after"):
            files = await self._batches.files(
                tenant_of(request),
                limit=limit + 1,
                after=after,
                purpose=request.query_params.get("purpose"),
                newest_first=newest_first,
            )
        return JSONResponse(list_object([file_object(file) for file in files], limit))

    @route("GET /v1/files/{id}", Access.INFERENCE, "Get a file's metadata.")
    async def get(self, request: Request) -> Response:
        id = request.path_params["id"]
        with found("file", id, "id"):
            return JSONResponse(file_object(await self._batches.file(tenant_of(request), id)))

    @route("GET /v1/files/{id}/content", Access.INFERENCE, "Download a file's contents.")
    async def content(self, request: Request) -> Response:
        id = request.path_params["id"]
        with found("file", id, "id"):
            file = await self._batches.file(tenant_of(request), id)
        path = self._batches.contents.path(file.id)
        if not path.exists():  # it has just been deleted
            raise not_found("file", id, "id")
        return FileResponse(
            path,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}"},
        )

    @route("DELETE /v1/files/{id}", Access.INFERENCE, "Delete a file.")
    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        try:
            with found("file", id, "id"):
                await self._batches.remove_file(tenant_of(request), id)
        except FileInUse:
            message = (
                f"The file {id!r:.200} is the input of a batch that has not ended; cancel the batch first."
            )
            raise ApiError(409, message, param="id", code="file_in_use") from None
        return JSONResponse({"id": id, "object": "file", "deleted": True})


class BatchRoutes(Endpoints):
    """The endpoint; ``model`` is the served model's name, ``endpoints`` are those that batches may use."""

    def __init__(self, batches: Batches, model: str, endpoints: Sequence[str]) -> None:
        self._batches = batches
        self._model = model
        self._endpoints = endpoints

    @route(
        "POST /v1/batches",
        Access.INFERENCE,
        "Create a batch from an uploaded file. Needs --batch-path.",
        body=BatchBody,
    )
    async def create(self, request: Request) -> Response:
        body = await typed_body(request, MAX_BODY_BYTES, BatchBody, NOT_YET)
        if body.endpoint not in self._endpoints:
            known, missing = ", ".join(self._endpoints), ""
            if body.endpoint in ENDPOINTS:
                missing = "; this server has no model for it"
            raise invalid(f"endpoint must be one of {known}; got {body.endpoint!r:.200}{missing}", "endpoint")
        seconds = window_seconds(body.completion_window)
        if seconds is None:
            message = (
                "completion_window must be 24h, or other minutes, hours or days from 1m to 7d (30m, 12h)"
            )
            raise invalid(message, "completion_window")
        expires = body.output_expires_after
        batch = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant_of(request),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            window_seconds=seconds,
            created_at=int(self._batches.clock()),
            metadata=body.metadata,
            output_seconds=None if expires is None else expires.seconds,
        )
        try:
            with found("file", body.input_file_id, "input_file_id"):
                return self._shown(await self._batches.create(batch))
        except QuotaExceeded as error:
            raise batch_quota_exceeded(str(error)) from None

    @route(
        "GET /v1/batches", Access.INFERENCE, "List the tenant's batches, newest first. Query: after, limit."
    )
    async def list(self, request: Request) -> Response:
        limit, _, after = read_page(request.query_params, LISTED, MAX_LISTED)
        with found("batch", after or "", "after"):
            page = await self._batches.batches(tenant_of(request), limit=limit + 1, after=after)
        return JSONResponse(list_object([batch_object(batch, self._model) for batch in page], limit))

    @route("GET /v1/batches/{id}", Access.INFERENCE, "Get a batch: its status, counts and output files.")
    async def get(self, request: Request) -> Response:
        id = request.path_params["id"]
        with found("batch", id, "id"):
            return self._shown(await self._batches.batch(tenant_of(request), id))

    @route("POST /v1/batches/{id}/cancel", Access.INFERENCE, "Cancel a batch. Results so far stay available.")
    async def cancel(self, request: Request) -> Response:
        id = request.path_params["id"]
        if raw := await read_body(request, MAX_BODY_BYTES):
            parse(raw, CancelBody, NOT_YET)
        try:
            with found("batch", id, "id"):
                return self._shown(await self._batches.cancel(tenant_of(request), id))
        except ValueError as error:
            raise ApiError(
                409, f"The batch cannot be cancelled: {error}.", param="id", code="batch_ended"
            ) from None

    def _shown(self, batch: BatchRecord) -> Response:
        return JSONResponse(batch_object(batch, self._model))


def file_object(file: FileRecord) -> dict[str, Any]:
    """A file as JSON."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.nbytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRecord, model: str) -> dict[str, Any]:
    """A batch as JSON."""
    totals, times = batch.totals, batch.times
    shown: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": model,
        "errors": {"object": "list", "data": list(batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id if batch.has_output else None,
        "error_file_id": batch.error_file_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "in_progress_at": times.get(BatchStatus.IN_PROGRESS),
        "expires_at": batch.expires_at,
    }
    for status in ("finalizing", "completed", "failed", "expired", "cancelling", "cancelled"):
        shown[f"{status}_at"] = times.get(status)
    shown["request_counts"] = {
        "total": batch.total,
        "completed": totals.completed,
        "failed": totals.failed,
    }
    shown["usage"] = {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens": totals.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
    }
    shown["metadata"] = batch.metadata
    return shown


def list_object(data: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page; ``data`` has one object more than ``limit`` if others follow."""
    page = data[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(data) > limit,
    }


def not_found(kind: str, id: str, param: str) -> ApiError:
    """404: the tenant has no file or batch with this id; another tenant may have it."""
    return ApiError(404, f"No such {kind}: {id!r:.200}.", param=param, code=f"{kind}_not_found")


@contextmanager
def found(kind: str, id: str, param: str) -> Iterator[None]:
    """Turn `NotFound` from the store into a 404 that names ``param``."""
    try:
        yield
    except NotFound:
        raise not_found(kind, id, param) from None


def batch_quota_exceeded(why: str) -> ApiError:
    """429: the tenant has as many unfinished batches as it may have."""
    return ApiError(
        429,
        f"The batch cannot be created: {why}.",
        type="rate_limit_error",
        code="batch_quota_exceeded",
        retry_after=60,
    )


class BatchApi:
    """The batches of a server, and their routes; neither if ``batches`` is None."""

    def __init__(self, batches: Batches | None, model: str, endpoints: Sequence[str] = ()) -> None:
        self.background = [] if batches is None else [batches]
        self._model = model
        self._endpoints = endpoints

    def routes(self) -> list[Route]:
        """The routes to mount."""
        parts = [part for each in self.background for part in self._parts(each)]
        return [route for part in parts for route in part.routes()]

    def _parts(self, batches: Batches) -> tuple[Files, BatchRoutes]:
        return Files(batches), BatchRoutes(batches, self._model, self._endpoints)


def open_batches(
    options: BatchOptions, server: ServerOptions, service: Service, parts: Sequence[LineEndpoints], model: str
) -> BatchApi:
    """Files and batches of a server whose only or first model is ``model``; none without a configured folder.

    Raises:
        ConfigError: the folder cannot be used.
    """
    if options.batch_path is None:
        return BatchApi(None, model)
    runner = LineRunner(service, parts)
    limits = Limits(options.batch_tenant_files, options.batch_tenant_bytes, options.batch_tenant_batches)
    bounds = Bounds(
        options.batch_file_bytes, server.max_body_bytes, options.batch_max_lines, options.batch_concurrency
    )
    try:
        take = partial(Batches, Path(options.batch_path), runner, limits, bounds, time.time)
        batches = when_free(take, server.takeover_timeout, options.batch_path)
    except OSError as error:
        raise ConfigError(f"--batch-path: {error}") from error
    return BatchApi(batches, model, runner.endpoints)
