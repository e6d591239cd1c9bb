"""Reloads keys, tenants and the log level of a running server, without dropping a stream.

A part that cannot be read leaves the old values in place and logs a warning; the other parts are reloaded all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from headrace.build.tenants import read_tenants
from headrace.config import ConfigError, Options, changed_options, reread
from headrace.core.engine import Engine
from headrace.core.tenancy.classes import ServiceClass
from headrace.core.tenancy.tenants import Tenants
from headrace.serve.auth.key_file import KeyFile
from headrace.serve.http.model import ServedModel
from headrace.serve.service import Service

logger = logging.getLogger(__name__)

RELOADED = frozenset({"api_key", "admin_key", "metrics_key", "api_key_file", "tenants", "log_level"})
"""Options whose new values, or the new contents of whose files, take effect at a reload."""


class Reload:
    """What SIGHUP does; called on the server's loop.

    ``options`` are those that the server started with. ``set_log_level`` receives the options as they are read now.
    """

    def __init__(
        self,
        options: Options,
        keys: KeyFile,
        service: Service,
        engine: Engine,
        model: ServedModel,
        classes: tuple[ServiceClass, ...],
        set_log_level: Callable[[Options], None] = lambda options: None,
    ) -> None:
        self._options = options
        self._keys = keys
        self._service = service
        self._engine = engine
        self._model = model
        self._classes = classes
        self._set_log_level = set_log_level

    async def __call__(self) -> None:
        """Read everything again and apply it."""
        logger.warning("SIGHUP: reloading API keys, tenants and log level")
        options = await asyncio.to_thread(self._reread)
        self._set_log_level(options)
        await asyncio.to_thread(self._keys.reload)
        await self._reload_tenants(options.scheduler.tenants)

    def _reread(self) -> Options:
        try:
            options = reread(self._options)
        except ConfigError as error:
            logger.warning("options not reloaded, the previous ones stay: %s", error)
            return self._options
        if fixed := sorted(set(changed_options(self._options, options)) - RELOADED):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
            logger.warning("these options have changed and need a restart: %s", names)
        return options

    async def _reload_tenants(self, file: str | None) -> None:
        try:
            tenants, classes = await asyncio.to_thread(read_tenants, file)
        except ConfigError as error:
            logger.warning("tenants not reloaded, the previous limits stay: %s", error)
            return
        if classes != self._classes:
            logger.warning("%s: changed classes of service need a restart", file)
        rules = self._model.rules
        if tenants == rules.tenants:
            return
        self._model.rules = replace(rules, tenants=tenants)
        self._service.meter.replace(tenants)
        await self._reweigh(tenants)
        logger.info("tenants reloaded: %d named", len(tenants.named))

    async def _reweigh(self, tenants: Tenants) -> None:
        if self._options.server.record_trace is not None:  # a replay could not repeat the change
            logger.warning("tenants' weights stay as they are while a trace is recorded")
            return
        weights = tenants.weights()
        await self._service.between_steps(lambda: self._engine.set_tenant_weights(weights))
