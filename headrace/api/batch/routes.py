"""``/v1/batches``: create, get, list and cancel. A tenant reaches only its own batches."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.batch.batches import Batches
from headrace.api.batch.files import tenant_of
from headrace.api.batch.lines import ENDPOINTS
from headrace.api.batch.records import BatchRecord, window_seconds
from headrace.api.batch.store import QuotaExceeded
from headrace.api.batch.wire import (
    BatchBody,
    CancelBody,
    batch_object,
    batch_quota_exceeded,
    found,
    list_object,
)
from headrace.api.body import read_body
from headrace.api.errors import ApiError, invalid
from headrace.api.generation.unsupported import NotYet
from headrace.api.paging import read_page
from headrace.api.routing import Endpoints, route
from headrace.api.wire import parse, parse_beside

MAX_LISTED = 100
LISTED = 20
MAX_BODY_BYTES = 64 << 10
NOT_YET: NotYet = {}


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
        body = await parse_beside(await read_body(request, MAX_BODY_BYTES), BatchBody, NOT_YET)
        if body.endpoint not in self._endpoints:
            known, missing = ", ".join(self._endpoints), ""
            if body.endpoint in ENDPOINTS:
                missing = "; this server has no model for it"
            raise invalid(f"endpoint must be one of {known}; got {body.endpoint!r}{missing}", "endpoint")
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
