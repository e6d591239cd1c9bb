"""Builds experiments and the tuner: which settings may change, and the task that changes them beside the server."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, NamedTuple

from headrace.build.policies import is_static
from headrace.config import Options
from headrace.core.engine import Engine
from headrace.observe.steering.engine import Steering
from headrace.observe.steering.settings import changed, live_settings
from headrace.observe.tuner.tuner import Mode
from headrace.serve.experiments import Experiments
from headrace.serve.http.operations.experiments import ExperimentRoutes
from headrace.serve.http.operations.tuner import TunerRoutes
from headrace.serve.service import Service


class Tuning(NamedTuple):
    """The task beside the server, and its endpoints."""

    task: Experiments
    endpoints: tuple[ExperimentRoutes, TunerRoutes]


def make_tuning(options: Options, engine: Engine, service: Service) -> Tuning:
    """Experiments and the tuner on the settings of one engine; they watch its events."""
    plans, chosen, limit = options.scheduler, options.tuning, options.server.max_body_bytes
    steering = Steering(
        live_settings(plans.max_num_seqs, static=is_static(plans)),
        lambda: engine.knobs,
        lambda: f"exp_{secrets.token_hex(8)}",
        Mode(chosen.tuner),
        chosen.tuner_window,
        chosen.tuner_window / 5,
    )
    for fold in steering.folds:
        service.watch(fold)

    def change(name: str, value: float | int) -> None:
        engine.knobs = changed(steering.settings, engine.knobs, name, value)

    file = Path(chosen.experiments_file) if chosen.experiments_file else None
    task = Experiments(steering, steering.conductor, service, change, file)

    def set_mode(mode: str) -> None:
        steering.tuner.set_mode(Mode(mode), service.now())
        task.look_again()

    def report() -> dict[str, Any]:
        return steering.tuner.report(steering.present())

    return Tuning(
        task,
        (
            ExperimentRoutes(task, lambda: _described(steering), max_body_bytes=limit),
            TunerRoutes(report, set_mode, max_body_bytes=limit),
        ),
    )


def _described(steering: Steering) -> dict[str, dict[str, Any]]:
    """The settings that may change, as clients see them."""
    present = steering.present()
    return {
        name: {"value": present[name], "low": each.low, "high": each.high, "help": each.help}
        for name, each in steering.settings.items()
    }
