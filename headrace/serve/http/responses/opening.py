"""The Responses API from its options: the store, the responses in the background, and the routes."""

from __future__ import annotations

from pathlib import Path

from headrace.config import ConfigError, ServerOptions
from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.cache.question_recorder import QuestionRecorder
from headrace.serve.http.generation.call_notes import CallNotes
from headrace.serve.http.model import ServedModel
from headrace.serve.http.rate_limit_headers import rate_headers
from headrace.serve.http.responses.background import BackgroundResponses
from headrace.serve.http.responses.routes import ResponsesApi
from headrace.serve.http.responses.store import ResponseStore


def open_responses(
    options: ServerOptions,
    recall: CacheLookup,
    model: ServedModel,
    notes: CallNotes,
    recorder: QuestionRecorder | None = None,
) -> ResponsesApi:
    """The endpoints, with their store open.

    Raises:
        ConfigError: the file of the store cannot be used.
    """
    path = None if options.response_store is None else Path(options.response_store)
    try:
        store = ResponseStore(path, options.response_store_bytes)
    except OSError as error:
        raise ConfigError(f"--response-store: {error}") from error
    background, service = BackgroundResponses(store), recall.service
    return ResponsesApi(
        recall,
        model,
        notes,
        store,
        background,
        max_body_bytes=options.max_body_bytes,
        request_timeout=options.request_timeout,
        headers=lambda tenant: rate_headers(service.meter.rooms(tenant, service.now())),
        recorder=recorder,
    )
