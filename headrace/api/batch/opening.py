"""Creates files and batches from the server's options: the folder, the limits, and the routes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from starlette.routing import Route

from headrace.api.batch.batches import Batches, Bounds
from headrace.api.batch.files import Files
from headrace.api.batch.line_runner import LineEndpoints, LineRunner
from headrace.api.batch.routes import BatchRoutes
from headrace.api.batch.store import Limits
from headrace.config import BatchOptions, ConfigError, ServerOptions
from headrace.service.service import Service
from headrace.service.takeover import when_free


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
