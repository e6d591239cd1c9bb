"""Changes to the served model while the server runs: LoRA adapters, sleep, with vLLM's routes and fields."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import typed_body
from headrace.api.errors import ApiError, invalid, model_not_found
from headrace.api.routing import Endpoints, route
from headrace.api.wire import NotYet, Wire
from headrace.core.adapters import AdapterError, AdapterMissing, AdapterNameError
from headrace.service.adapters import AdapterNames, UnknownAdapter
from headrace.service.sleep import (
    LEVELS,
    MODES,
    CannotSleep,
    CannotWakeUp,
    Change,
    Part,
    Sleep,
    WokenUp,
)

logger = logging.getLogger(__name__)

MAX_NAME_CHARACTERS = 256
MAX_PATH_CHARACTERS = 4096


class LoadAdapterBody(Wire):
    """An adapter to load."""

    lora_name: str = Field(
        min_length=1, max_length=MAX_NAME_CHARACTERS, description="Model name of its requests."
    )
    lora_path: str = Field(
        min_length=1,
        max_length=MAX_PATH_CHARACTERS,
        description="Folder on the server with adapter_config.json and adapter_model.safetensors.",
    )
    load_inplace: bool = Field(False, description="Replace the weights of a loaded adapter of this name.")


class UnloadAdapterBody(Wire):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS, description="Its model name.")


IN_THREE_DIMENSIONS: NotYet = {"is_3d_lora_weight": (False,)}
"""A field of vLLM that is not needed: the files of an adapter show the form of its experts."""
NUMBERED: NotYet = {"lora_int_id": ()}
"""A field of vLLM that names no adapter here, because adapters have no numbers."""


class AdapterRoutes(Endpoints):
    """The endpoints."""

    def __init__(self, names: AdapterNames, *, max_body_bytes: int) -> None:
        self._names = names
        self._max_body_bytes = max_body_bytes

    @route(
        "POST /v1/load_lora_adapter",
        Access.ADMIN,
        "Load a LoRA adapter, which requests then select by its name.",
        body=LoadAdapterBody,
        example={"lora_name": "sql", "lora_path": "/adapters/sql"},
    )
    async def load(self, request: Request) -> Response:
        """404 if there is no adapter in the folder; 400 if the name is in use, or the adapter cannot be used."""
        body = await typed_body(request, self._max_body_bytes, LoadAdapterBody, IN_THREE_DIMENSIONS)
        try:
            adapter = await self._names.load(body.lora_name, body.lora_path, replace=body.load_inplace)
        except AdapterError as error:
            why = f"The LoRA adapter {body.lora_name!r:.200} cannot be loaded: {error}"
            if isinstance(error, AdapterMissing):
                raise ApiError(404, why, param="lora_path", code="adapter_not_found") from None
            field = "lora_name" if isinstance(error, AdapterNameError) else "lora_path"
            raise invalid(why, field) from None
        logger.info("LoRA adapter %s loaded from %s (%s)", adapter.name, adapter.path, adapter.digest[:12])
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    @route(
        "POST /v1/unload_lora_adapter",
        Access.ADMIN,
        "Unload a LoRA adapter; its accepted requests run to their end.",
        body=UnloadAdapterBody,
        example={"lora_name": "sql"},
    )
    async def unload(self, request: Request) -> Response:
        """404 if there is no adapter of this name."""
        body = await typed_body(request, self._max_body_bytes, UnloadAdapterBody, NUMBERED)
        try:
            await self._names.unload(body.lora_name)
        except UnknownAdapter:
            raise model_not_found(body.lora_name, "lora_name") from None
        logger.info("LoRA adapter %s unloaded", body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


class SleepRoutes(Endpoints):
    """The endpoints. Cached responses are served while the model sleeps; other requests are rejected with 503."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep

    @route(
        "POST /sleep",
        Access.ADMIN,
        "Free the memory of the model: ?level=1 of its KV cache, ?level=2 of its weights too.",
    )
    async def sleep(self, request: Request) -> Response:
        """``?level=``, or ``?tags=``, and ``?mode=``: see the guide of serving."""
        query = request.query_params
        level, mode = query.get("level", "1"), query.get("mode", "wait")
        if level not in map(str, LEVELS):
            raise invalid(
                f"level must be 1 or 2, got {level[:40]!r}; to reject requests only, use /pause", "level"
            )
        if mode not in MODES:
            raise invalid(f"mode must be wait, abort or keep, got {mode[:40]!r}", "mode")
        parts = _parts(request) or LEVELS[int(level)]
        try:
            change = await self._sleep.sleep(parts, mode)
        except CannotSleep as error:
            raise invalid(f"{error}.", "tags" if "tags" in query else "level") from None
        except WokenUp:
            raise ApiError(409, "The model was woken up before it slept.", code="woken_up") from None
        shown = _shown(change)
        return JSONResponse(
            shown | {"prefix_cache_reset": Part.KV_CACHE in parts, "aborted_requests": change.aborted}
        )

    @route(
        "POST /wake_up", Access.ADMIN, "Restore the memory of a sleeping model, or the parts ?tags= of it."
    )
    async def wake_up(self, request: Request) -> Response:
        """Requests run again when no part sleeps any more."""
        try:
            change = await self._sleep.wake_up(_parts(request) or frozenset(Part))
        except CannotWakeUp as error:
            raise ApiError(409, f"The model sleeps on: {error}.", code="not_woken_up") from None
        return JSONResponse(_shown(change))

    @route(
        "GET /is_sleeping", Access.ANY_KEY, "Report whether the model sleeps, and which parts of its memory."
    )
    async def is_sleeping(self, request: Request) -> Response:
        """``sleeping`` lists the parts."""
        sleeping = self._sleep.sleeping
        return JSONResponse({"is_sleeping": bool(sleeping), "sleeping": sleeping})


def _parts(request: Request) -> frozenset[Part]:
    """The parts that the query's ``tags`` name.

    Raises:
        ApiError: there is no such part.
    """
    tags = request.query_params.getlist("tags")
    for tag in tags:
        if tag not in list(Part):
            raise invalid(f"tags must be kv_cache or weights, got {tag[:40]!r}", "tags")
    return frozenset(map(Part, tags))


def _shown(change: Change) -> dict[str, Any]:
    memory = change.memory
    return {
        "is_sleeping": bool(memory.sleeping),
        "sleeping": memory.sleeping,
        "open_requests": change.kept,
        "resident_bytes_before": memory.before_bytes,
        "resident_bytes": memory.after_bytes,
        "seconds": round(change.seconds, 3),
    }
