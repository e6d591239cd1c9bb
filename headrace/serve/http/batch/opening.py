"""Files and batches from their options: the folder, the limits, and the routes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from starlette.routing import Route

from headrace.config import BatchOptions, ConfigError, ServerOptions
from headrace.serve.batch.batches import Batches, Bounds
from headrace.serve.batch.store import Limits
from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.batch.batches import BatchRoutes
from headrace.serve.http.batch.files import Files
from headrace.serve.http.batch.line_runner import LineRunner
from headrace.serve.http.generation.call_notes import CallNotes
from headrace.serve.http.model import ServedModel


class BatchApi(NamedTuple):
    """The batches of a server, and the routes to them."""

    batches: Batches
    routes: list[Route]


def open_batches(
    options: BatchOptions, server: ServerOptions, recall: CacheLookup, model: ServedModel, notes: CallNotes
) -> BatchApi | None:
    """Files and batches, if a folder is configured.

    Raises:
        ConfigError: the folder cannot be used.
    """
    if options.batch_path is None:
        return None
    runner = LineRunner(recall, model, notes, request_timeout=server.request_timeout)
    limits = Limits(options.batch_tenant_files, options.batch_tenant_bytes, options.batch_tenant_batches)
    bounds = Bounds(
        options.batch_file_bytes, server.max_body_bytes, options.batch_max_lines, options.batch_concurrency
    )
    try:
        batches = Batches(Path(options.batch_path), runner, limits, bounds, time.time)
    except OSError as error:
        raise ConfigError(f"--batch-path: {error}") from error
    return BatchApi(batches, [*Files(batches).routes(), *BatchRoutes(batches, model.name).routes()])
