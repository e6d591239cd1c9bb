"""Builds the tuning of a server: the background task that changes settings, and dry runs of experiments.

A dry run simulates the server's measured load and step times in another process.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from headrace.api.operations.tuning import ExperimentRoutes, TunerRoutes
from headrace.config import CacheOptions, Options, SchedulerOptions
from headrace.core.prediction.step_curve import StepCost
from headrace.core.request import FinishReason
from headrace.core.tenancy.tenants import ClassShare, ServiceClass
from headrace.observe.cost.prices import Coefficients
from headrace.observe.goodput import Goodput
from headrace.observe.steps.timelines import Timelines
from headrace.response_cache.lookup import CacheLookup
from headrace.tuning.class_shares import LiveShares, Shares, counts_of
from headrace.tuning.evaluator import EvaluatorProcess
from headrace.tuning.live import LiveTuning, curve_reader
from headrace.tuning.measures import By, describe_metrics
from headrace.tuning.settings import AnyValue, changed
from headrace.tuning.spec import BadExperiment, Spec
from headrace.tuning.tuner import Mode
from headrace.wiring.controls import Controls
from headrace.wiring.engine_tuning import make_engine_tuning
from headrace.wiring.feature import Feature, Hall
from headrace.wiring.model import ReadyModel, decoder_cost

CLASS_WEIGHT_HELP = "Present weight of a service class whose weight may move."
CLASS_FLOOR_HELP = "Present floor of a service class whose floor may move, 0 to 1."


class Tuning(NamedTuple):
    """The background tasks and the endpoints."""

    tasks: tuple[EvaluatorProcess, LiveTuning]
    endpoints: tuple[ExperimentRoutes, TunerRoutes]


def make_tuning(
    options: Options, controls: Controls, lookup: CacheLookup, machine: Machine, timelines: Timelines
) -> Tuning:
    """LiveTuning and the tuner on the settings of one engine and of its requests.

    A dry run simulates ``machine`` with the load of the requests in ``timelines``.
    """
    plans, chosen, limit = options.scheduler, options.tuning, options.server.max_body_bytes
    service, evaluator = lookup.service, EvaluatorProcess(controls.overlap)
    tuning = make_engine_tuning(
        plans,
        controls,
        lambda: f"exp_{secrets.token_hex(8)}",
        request_timeout=options.server.request_timeout,
        semantic=options.semantic.semantic_cache == "serve",
        mode=Mode(chosen.tuner),
        window_seconds=chosen.tuner_window,
        read_curve=curve_reader(service, controls.measured_steps),
        evaluate=evaluator.evaluate,
    )
    lookup.assigned = tuning.assigned

    def change(name: str, value: AnyValue) -> None:
        controls.set_knobs(changed(tuning.settings, controls.knobs, name, value))

    file = Path(chosen.experiments_file) if chosen.experiments_file else None
    task = LiveTuning(tuning, service, change, file)
    dry_runs = DryRuns(
        controls, options.scheduler, options.cache, machine, timelines, tuning.experiments.read
    )

    def set_mode(mode: str) -> None:
        tuning.tuner.set_mode(Mode(mode), service.now())
        task.look_again()

    def known() -> dict[str, Any]:
        return {"settings": tuning.describe(), "metrics": describe_metrics()}

    def report() -> dict[str, Any]:
        return tuning.tuner.report()

    return Tuning(
        (evaluator, task),
        (
            ExperimentRoutes(task, known, dry_runs.run, max_body_bytes=limit),
            TunerRoutes(report, set_mode, max_body_bytes=limit),
        ),
    )


def make_class_shares(
    classes: tuple[ServiceClass, ...], controls: Controls, hall: Hall, goodput: Goodput, task: LiveTuning
) -> Feature:
    """What moves weights and floors of the classes that have bounds for it; without such a class, nothing."""
    shares = Shares(classes)
    if not shares.any:
        return Feature()
    weights = hall.page.gauge("class_weight", CLASS_WEIGHT_HELP, ["class"])
    floors = hall.page.gauge("class_floor", CLASS_FLOOR_HELP, ["class"])

    def counts() -> dict[str, tuple[int, int]]:
        hall.service.count()
        return counts_of(goodput)

    def changed(name: str, share: ClassShare) -> None:
        weights.of(name).value, floors.of(name).value = share

    mover = LiveShares(
        *(shares, hall.service, counts, controls.set_class_shares),
        frozen=lambda: task.experiments.running is not None,
        changed=changed,
    )
    return Feature(background=[mover])


PROGRAM = "headrace.wiring.dry_run"
LEAST_REQUESTS = 20
"""Minimum number of ended requests: a dry run repeats their load."""

MOST_SECONDS = 150.0
"""Time limit of the program, which normally ends before."""

COMPLETED = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value})


class Machine(NamedTuple):
    """The simulated machine, without the measured step times. ``kind`` is ``cpu`` or ``cuda``. For recurrent states see
    `Calibration`.
    """

    name: str
    kind: str
    kv_tokens: int
    max_model_len: int
    cost: StepCost
    state_bytes: int = 0
    state_cells: int = 0


def machine_of(loaded: ReadyModel) -> Machine:
    """The machine of a loaded model."""
    kind, ledger = loaded.facts.kind, loaded.ledger
    cost, states = decoder_cost(loaded.shape, kind), (ledger.state_bytes, ledger.state_cells)
    return Machine(loaded.name, kind, ledger.kv_tokens, ledger.max_model_len, cost, *states)


class DryRuns:
    """Runs dry runs. ``read`` checks an experiment; ``timelines`` has the requests whose load is repeated."""

    def __init__(
        self,
        controls: Controls,
        scheduler: SchedulerOptions,
        cache: CacheOptions,
        machine: Machine,
        timelines: Timelines,
        read: Callable[[Any], Spec],
    ) -> None:
        self._controls = controls
        self._scheduler = scheduler
        self._cache = cache
        self._machine = machine
        self._timelines = timelines
        self._read = read
        self._running = False

    async def run(self, body: dict[str, Any]) -> dict[str, Any]:
        """The report of the experiment in virtual time, with its windows, from a separate process.

        Raises:
            BadExperiment: a field is invalid, or the setting belongs to a request.
            RuntimeError: the server has measured too little, another dry run is running, or this one failed.
        """
        spec = self._read(body)
        if spec.unit != By.TIME:
            raise BadExperiment(
                "setting", "a dry run compares settings of the engine, not of single requests"
            )
        if self._running:
            raise RuntimeError("another dry run is running; wait for its end")
        task = self._task(body)
        self._running = True
        try:
            return await asyncio.wait_for(_run(task), MOST_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"the dry run took more than {MOST_SECONDS:g} s") from None
        finally:
            self._running = False

    def _task(self, body: dict[str, Any]) -> bytes:
        recorded = self._recorded()
        counts = self._controls.counts
        if not counts.ready or len(recorded) < LEAST_REQUESTS:
            raise RuntimeError(
                f"a dry run repeats the load of the server: at least {LEAST_REQUESTS} requests must have ended, "
                f"{len(recorded)} have"
            )
        fields = {
            "experiment": body,
            "scheduler": asdict(self._scheduler),
            "cache": asdict(self._cache),
            "knobs": asdict(self._controls.knobs),
            "calibration": self._calibration(counts.coefficients),
            "recorded": recorded,
        }
        return json.dumps(fields).encode()

    def _calibration(self, coefficients: Coefficients) -> dict[str, Any]:
        """The engine's measured step times as a `lab.calibration`."""
        from headrace.lab.calibration import BENDS, Calibration  # the simulator is not part of a start

        on = self._machine
        step, row, token, context = coefficients
        return asdict(
            Calibration(
                model=on.name,
                machine="this server",
                kind=on.kind,
                dtype="",
                kernels="",
                kv_tokens=on.kv_tokens,
                max_model_len=on.max_model_len,
                fixed_tokens=on.cost.fixed_tokens,
                context_tokens=on.cost.context_tokens,
                steps=0,
                step=step,
                row=row,
                tokens=(token,) * len(BENDS),
                context=context,
                state_bytes=on.state_bytes,
                state_cells=on.state_cells,
                **dict.fromkeys(("read", "sample", "host_step", "host_row", "error_p50", "error_p90"), 0.0),
            )
        )

    def _recorded(self) -> list[tuple[float, int, int, int, str, str]]:
        """The requests that have ended, by arrival; see `wiring.dry_run.Recorded`."""
        return sorted(
            (
                timeline.arrived,
                timeline.prompt_tokens,
                timeline.output_tokens,
                min(timeline.found, timeline.prompt_tokens - 1),
                timeline.tenant,
                timeline.service_class,
            )
            for _, timeline in self._timelines.items()
            if timeline.finish is not None
            and timeline.finish["reason"] in COMPLETED
            and timeline.output_tokens
        )


async def _run(task: bytes) -> dict[str, Any]:
    """Run the program; it is killed if this task is cancelled."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", PROGRAM), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        output, errors = await process.communicate(task)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"the dry run failed: {last[:500]}")
    report: dict[str, Any] = json.loads(output)
    return report
