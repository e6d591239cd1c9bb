"""``/v1/batches``: create, get, list and cancel. A tenant reaches only its own batches."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
from headrace.api.paging import read_page
from headrace.api.wire import NotYet, parse, parse_beside

MAX_LISTED = 100
LISTED = 20
MAX_BODY_BYTES = 64 << 10
NOT_YET: NotYet = {}


class BatchRoutes:
    """The endpoint; ``model`` is the served model's name, ``endpoints`` are those that batches may use."""

    def __init__(self, batches: Batches, model: str, endpoints: Sequence[str]) -> None:
        self._batches = batches
        self._model = model
        self._endpoints = endpoints

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list),
            Route("/v1/batches/{id}", self.get),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """``POST /v1/batches``."""
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

    async def list(self, request: Request) -> Response:
        """``GET /v1/batches``."""
        limit, _, after = read_page(request.query_params, LISTED, MAX_LISTED)
        with found("batch", after or "", "after"):
            page = await self._batches.batches(tenant_of(request), limit=limit + 1, after=after)
        return JSONResponse(list_object([batch_object(batch, self._model) for batch in page], limit))

    async def get(self, request: Request) -> Response:
        """``GET /v1/batches/{id}``."""
        id = request.path_params["id"]
        with found("batch", id, "id"):
            return self._shown(await self._batches.batch(tenant_of(request), id))

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/batches/{id}/cancel``."""
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
