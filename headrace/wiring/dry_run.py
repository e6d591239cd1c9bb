"""Experiments in virtual time: on simulated engines, and as the dry run of a server, in its own process.

A server runs ``python -m headrace.wiring.dry_run`` with a `Task` on standard input, so that the simulation does not
share an interpreter with the engine. The program prints the report of the experiment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.engine import Engine
from headrace.core.knobs import Knobs
from headrace.lab.calibration import Calibration
from headrace.lab.simulate.runner import from_calls
from headrace.lab.workload.work import Call, Span, Synthesis, resampled
from headrace.tuning.engine_tuning import EngineTuning
from headrace.tuning.experiment import Experiment, Status
from headrace.wiring.engine_tuning import make_engine_tuning
from headrace.wiring.simulation import calibrated_machine, make_fleet

MOST_SECONDS = 60.0
"""Wall-clock time limit of a dry run: no further request arrives after it."""

MOST_REQUESTS = 200_000
"""Maximum requests of a dry run."""

NICE = 10
"""The nice value of the program, so that the engine has priority."""


class Trial:
    """One experiment on each of several simulated engines. ``knobs`` are an engine's initial ones (None: its own)."""

    def __init__(self, body: dict[str, Any], knobs: Knobs | None = None) -> None:
        self._body = body
        self._knobs = knobs
        self.experiments: list[Experiment] = []

    def steer(self, plans: SchedulerOptions, engine: Engine) -> EngineTuning:
        """Begin the experiment on an engine.

        Raises:
            InvalidParameter: a field of the experiment is invalid.
        """
        engine.knobs = self._knobs or engine.knobs
        tuning = make_engine_tuning(plans, engine, lambda: f"replica {len(self.experiments)}")
        self.experiments.append(tuning.experiments.start(self._body, 0.0))
        return tuning

    @property
    def running(self) -> bool:
        """Whether an experiment has not decided yet."""
        return any(each.status is Status.RUNNING for each in self.experiments)


class Recorded(NamedTuple):
    """A request of the server: its arrival in seconds, its tokens, and the number of cached prompt tokens."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    tenant: str
    service_class: str


class Task(NamedTuple):
    """The input of the program, as plain values for JSON; options and knobs are the server's."""

    experiment: dict[str, Any]
    scheduler: dict[str, Any]
    cache: dict[str, Any]
    knobs: dict[str, Any]
    calibration: dict[str, Any]
    recorded: Sequence[Sequence[Any]]


def dry_run(task: Task) -> dict[str, Any]:
    """Run the experiment with requests drawn from the recorded ones; returns its report with its windows.

    Drafts and lower memory tiers are not simulated.

    Raises:
        InvalidParameter: a field of the experiment is invalid.
    """
    plans = replace(SchedulerOptions(**task.scheduler), speculative_config=None)
    cache = replace(
        CacheOptions(**task.cache), kv_cache_memory_bytes=None, kv_offload_bytes=0, kv_offload_path=None
    )
    tokens = tuple(task.calibration["tokens"])
    machine = calibrated_machine(Calibration(**task.calibration | {"tokens": tokens}), cache)
    trial = Trial(task.experiment, Knobs(**task.knobs))
    fleet = make_fleet(plans, cache, machine, steer=lambda engine: trial.steer(plans, engine))
    recorded = [Recorded(*each) for each in task.recorded]
    sent = 0

    def counted() -> Iterator[Call]:
        nonlocal sent
        for call in _calls(recorded, trial, task.experiment.get("seed", 0)):
            sent += 1
            yield call

    fleet.run(from_calls(counted(), Synthesis()))
    (experiment,) = trial.experiments
    why = f"no evidence in the {MOST_SECONDS:g} s that a dry run may take; shorter windows need less time"
    experiment.stop(Status.UNDECIDED, why, fleet.now)
    simulated = {"requests": sent, "seconds": fleet.now, "recorded_requests": len(recorded)}
    return experiment.report() | {
        "windows": experiment.windows(),
        "curve": experiment.curve(),
        "simulated": simulated,
    }


def _calls(recorded: Sequence[Recorded], trial: Trial, seed: int) -> Iterator[Call]:
    """Requests drawn from the recorded ones in blocks, until the experiment has decided or the time limit is reached.

    The cached part of a prompt is the same in all requests of its tenant; the rest is unique.
    """
    until = time.monotonic() + MOST_SECONDS
    tenants = {name: number for number, name in enumerate(sorted({each.tenant for each in recorded}))}
    templates = [
        Call(
            each.arrival,
            each.prompt_tokens,
            each.output_tokens,
            each.tenant,
            each.service_class,
            (Span(tenants[each.tenant], 0, each.cached_tokens),),
        )
        for each in recorded
    ]
    for number, call in enumerate(resampled(templates, MOST_REQUESTS, seed), len(tenants)):
        if not trial.running or time.monotonic() > until:
            return
        (shared,) = call.content
        own = Span(number, 0, call.prompt_tokens - shared.length)
        yield call._replace(content=(shared, own) if shared.length else (own,))


def main() -> None:
    """Read a task, run it and print its report."""
    os.nice(NICE)
    json.dump(dry_run(Task(**json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()
