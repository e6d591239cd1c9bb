"""Builds experiments: which settings may change, and the task that runs experiments beside the server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config import Options
from headrace.core.engine import Engine
from headrace.observe.experiments.conductor import Conductor
from headrace.observe.settings import Setting, changed, live_settings, values
from headrace.serve.experiments import Experiments
from headrace.serve.http.operations.experiments import ExperimentRoutes
from headrace.serve.service import Service


class Tuning(NamedTuple):
    """The task beside the server, and its endpoints."""

    experiments: Experiments
    endpoint: ExperimentRoutes


def make_tuning(options: Options, engine: Engine, service: Service) -> Tuning:
    """Experiments on the settings of one engine; the conductor watches its events."""
    settings = live_settings(options.scheduler.max_num_seqs)
    conductor = Conductor(
        settings, lambda: values(settings, engine.knobs), lambda: f"exp_{secrets.token_hex(8)}"
    )
    service.watch(conductor)

    def change(name: str, value: float | int) -> None:
        engine.knobs = changed(settings, engine.knobs, name, value)

    file = options.tuning.experiments_file
    experiments = Experiments(conductor, service, change, Path(file) if file else None)
    return Tuning(
        experiments,
        ExperimentRoutes(
            experiments,
            lambda: describe_settings(settings, engine),
            max_body_bytes=options.server.max_body_bytes,
        ),
    )


def describe_settings(settings: Mapping[str, Setting], engine: Engine) -> dict[str, dict[str, Any]]:
    """The settings that may change, as clients see them."""
    present = values(settings, engine.knobs)
    return {
        name: {"value": present[name], "low": each.low, "high": each.high, "help": each.help}
        for name, each in settings.items()
    }
