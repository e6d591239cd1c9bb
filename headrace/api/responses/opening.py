"""Creates the Responses API from the server's options: the store, the background responses, and the routes."""

from __future__ import annotations

from pathlib import Path

from headrace.api.generation.serving import Serving
from headrace.api.responses.background import BackgroundResponses
from headrace.api.responses.routes import ResponsesApi
from headrace.api.responses.store import ResponseStore
from headrace.config import ConfigError, ServerOptions


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
