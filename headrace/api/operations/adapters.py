"""Loads and unloads LoRA adapters while the server runs, with vLLM's routes and fields."""

from __future__ import annotations

import logging

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import typed_body
from headrace.api.errors import ApiError, invalid, model_not_found
from headrace.api.routing import Endpoints, route
from headrace.api.wire import NotYet, Wire
from headrace.core.adapters import AdapterError, AdapterMissing, AdapterNameError
from headrace.service.adapters import AdapterNames, UnknownAdapter

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
