"""Builds experiments and the tuner: the settings that may change, and the background task that changes them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, NamedTuple

from headrace.api.operations.tuning import ExperimentRoutes, TunerRoutes
from headrace.config import Options
from headrace.core.engine import Engine
from headrace.observe.steps.timelines import Timelines
from headrace.response_cache.lookup import CacheLookup
from headrace.tuning.experiments.units import describe_metrics
from headrace.tuning.live import Experiments
from headrace.tuning.steering.engine import Steering
from headrace.tuning.steering.settings import changed, live_settings
from headrace.tuning.tuner.tuner import Mode
from headrace.wiring.engine import has_patience, is_static
from headrace.wiring.operations.dry_runs import DryRuns, Machine
from headrace.wiring.operations.rehearsals import Rehearsals
from headrace.wiring.operations.request_settings import make_requests


class Tuning(NamedTuple):
    """The background tasks and the endpoints."""

    tasks: tuple[Rehearsals, Experiments]
    endpoints: tuple[ExperimentRoutes, TunerRoutes]


def make_tuning(
    options: Options, engine: Engine, recall: CacheLookup, machine: Machine, lives: Timelines
) -> Tuning:
    """Experiments and the tuner on the settings of one engine and of its requests.

    A dry run simulates ``machine`` with the load of the requests in ``lives``.
    """
    plans, chosen, limit = options.scheduler, options.tuning, options.server.max_body_bytes
    service, rehearsals = recall.service, Rehearsals(engine.overlap)
    steering = Steering(
        live_settings(plans.max_num_seqs, static=is_static(plans), patience=has_patience(plans)),
        lambda: engine.knobs,
        lambda: f"exp_{secrets.token_hex(8)}",
        Mode(chosen.tuner),
        chosen.tuner_window,
        make_requests(
            options.scheduler,
            request_timeout=options.server.request_timeout,
            semantic=options.semantic.semantic_cache == "serve",
        ),
        engine.times,
        rehearsals.run,
    )
    recall.assigned = steering.assigned

    def change(name: str, value: float | int | str) -> None:
        engine.knobs = changed(steering.settings, engine.knobs, name, value)

    file = Path(chosen.experiments_file) if chosen.experiments_file else None
    task = Experiments(steering, steering.conductor, service, change, file)
    dry_runs = DryRuns(engine, options.scheduler, options.cache, machine, lives, steering.conductor.read)

    def set_mode(mode: str) -> None:
        steering.tuner.set_mode(Mode(mode), service.now())
        task.look_again()

    def known() -> dict[str, Any]:
        return {"settings": steering.describe(), "metrics": describe_metrics()}

    def report() -> dict[str, Any]:
        return steering.tuner.report()

    return Tuning(
        (rehearsals, task),
        (
            ExperimentRoutes(task, known, dry_runs.run, max_body_bytes=limit),
            TunerRoutes(report, set_mode, max_body_bytes=limit),
        ),
    )
