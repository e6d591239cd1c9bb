"""The LoRA adapters of a server: those that are loaded at start, and the feature that loads and unloads others."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.api.operations.adapters import AdapterRoutes
from headrace.config import ConfigError, Options, read_modules
from headrace.core.adapters import AdapterError
from headrace.observe.adapters import AdapterRequests
from headrace.observe.metrics_page import MetricsPage
from headrace.service.adapters import AdapterNames, KnownAdapters
from headrace.wiring.feature import Feature
from headrace.wiring.model import ReadyModel, served_names


def make_adapter_names(
    loaded: ReadyModel, options: Options, others: Sequence[str] = ()
) -> AdapterNames | None:
    """The adapters by name, those of ``--lora-modules`` loaded; None without ``--enable-lora``.

    ``others`` are the names of the server's models for embeddings and scores.

    Raises:
        ConfigError: an adapter cannot be loaded.
    """
    if loaded.adapters is None:
        return None
    served = (*served_names(options.model), options.model.model)
    names = AdapterNames(loaded.adapters, (*served, *others))
    for name, path, base in read_modules(options.server.lora_modules):
        if base and base not in served:
            raise ConfigError(
                f"--lora-modules {name}: base_model_name {base!r:.200} is not the served model, {served[0]!r:.200}"
            )
        try:
            names.add(name, path)
        except AdapterError as error:
            raise ConfigError(f"--lora-modules {name}={path}: {error}") from None
    return names


def make_adapters(
    loaded: ReadyModel, options: Options, names: KnownAdapters | None, page: MetricsPage
) -> list[Feature]:
    """Routes that load and unload adapters, and their metric."""
    if not isinstance(names, AdapterNames):
        return []
    requests = AdapterRequests(page, options.adapters.max_loras, names.name_of, time.time)
    routes = AdapterRoutes(names, max_body_bytes=options.server.max_body_bytes)
    shown = [f"adapter      {each.name}: {each.path}" for each in names]
    return [Feature([routes], [requests], lines=shown)]
