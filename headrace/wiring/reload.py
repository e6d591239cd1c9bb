"""Reloads keys, tenants and the log level of a running server, without dropping a stream.

If a part cannot be read, its old values stay and a warning is logged; the other parts are still reloaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headrace.api.auth.api_keys import KeyFile
from headrace.api.compile.model import ServedModel
from headrace.config import ConfigError, Options, changed_options, reread
from headrace.core.tenancy.kv_limits import NO_KV_BOUNDS, KvBounds, kv_bounds
from headrace.core.tenancy.tenants import ServiceClass, Tenants
from headrace.observe.log import Level
from headrace.service.service import Service
from headrace.wiring.controls import Controls
from headrace.wiring.tenants import check_kv_bounds, read_tenants

logger = logging.getLogger(__name__)

RELOADED = frozenset({"tenants", "log_level"})
"""Options whose new values take effect at a reload. Keys are read again from the original key file."""


class Settings(NamedTuple):
    """The current values of the reloadable options."""

    tenants: str | None
    log_level: Level


def read_settings(started: Options) -> Settings:
    """The reloadable options from the configuration file and the environment; those of ``started`` if they are invalid.

    Other options that have changed since the start are named in a warning.
    """
    options = started
    try:
        options = reread(started)
    except ConfigError as error:
        logger.warning("options not reloaded, the previous ones stay: %s", error)
    if fixed := sorted(set(changed_options(started, options)) - RELOADED):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        logger.warning("these options have changed and need a restart: %s", names)
    return Settings(options.scheduler.tenants, options.observability.log_level)


class Reload:
    """The handler of SIGHUP; called on the server's event loop.

    ``tenants`` and ``classes`` are those at the start; ``recorded``: a scheduler trace is recorded. A server without a
    model that generates has neither ``controls`` nor ``model``. The KV cache holds ``kv_tokens``. ``policy`` is the
    scheduling policy. ``fronts`` lets front ends reload too, ``send_rules`` sends them the tenants that are taken over.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        keys: KeyFile,
        service: Service,
        controls: Controls | None,
        model: ServedModel | None,
        *,
        tenants: Tenants,
        classes: tuple[ServiceClass, ...],
        kv_tokens: int,
        policy: str,
        recorded: bool,
        set_level: Callable[[Level], None],
        fronts: Callable[[], None] = lambda: None,
        send_rules: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._service = service
        self._controls = controls
        self._model = model
        self._tenants = tenants
        self._classes = classes
        self._kv_tokens = kv_tokens
        self._policy = policy
        self._recorded = recorded
        self._set_level = set_level
        self._fronts = fronts
        self._send_rules = send_rules

    async def __call__(self) -> None:
        """Read everything again and apply it."""
        logger.info("reloading API keys, tenants and log level")
        self._fronts()
        settings = await asyncio.to_thread(self._settings)
        self._set_level(settings.log_level)
        await asyncio.to_thread(self._keys.reload)
        await self._reload_tenants(settings.tenants)
        if (controls := self._controls) is not None:  # its engine may have another process
            await self._service.between_steps(lambda: controls.set_log_level(settings.log_level))

    async def _reload_tenants(self, file: str | None) -> None:
        try:
            tenants, classes = await asyncio.to_thread(read_tenants, file)
            bounds = self._bounds(tenants)
            check_kv_bounds(bounds, self._policy, recorded=self._recorded)
        except ConfigError as error:
            logger.warning("tenants not reloaded, the previous limits stay: %s", error)
            return
        if classes != self._classes:
            logger.warning("--tenants: changed service classes need a restart")
        if tenants == self._tenants:
            return
        self._tenants = tenants
        if self._model is not None:
            self._model.rules = replace(self._model.rules, tenants=tenants)
            self._send_rules()
        self._service.meter.replace(tenants, bounds)
        if self._controls is not None:
            await self._set_weights(self._controls, tenants, bounds)
        logger.info("tenants reloaded: %d named", len(tenants.named))

    def _bounds(self, tenants: Tenants) -> KvBounds:
        if self._controls is None:
            return NO_KV_BOUNDS
        return kv_bounds(tenants, self._classes, self._kv_tokens)

    async def _set_weights(self, controls: Controls, tenants: Tenants, bounds: KvBounds) -> None:
        if self._recorded:  # a replay could not repeat the change
            logger.warning("tenants' weights stay as they are while a trace is recorded")
            return
        weights = tenants.weights()
        await self._service.between_steps(lambda: controls.set_tenants(weights, bounds))
