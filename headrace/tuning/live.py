"""Runs experiments and the tuner: wakes when a window begins or ends, changes settings between steps, writes the file.

`engine_tuning` decides; this file has the clock, the engine thread and the disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.core.ports import Watcher
from headrace.core.prediction.step_curve import MeasuredSteps, StepCurve
from headrace.files import PRIVATE_FILE, replace_text
from headrace.service.background import end
from headrace.service.service import Service
from headrace.tuning.engine_tuning import EngineTuning
from headrace.tuning.evaluator import NotEvaluated, ReadCurve
from headrace.tuning.experiment import Experiment
from headrace.tuning.settings import AnyValue, Change

logger = logging.getLogger("headrace.experiments")

LONGEST_SLEEP = 3600.0
"""Maximum sleep in seconds of the task, even if nothing is due."""

FILE_VERSION = 1


class LiveTuning:
    """The background task. ``change`` sets a setting, on the engine thread; ``path`` is the file of the experiments."""

    def __init__(
        self,
        tuning: EngineTuning,
        service: Service,
        change: Callable[[str, AnyValue], None],
        path: Path | None,
    ) -> None:
        self.experiments = tuning.experiments
        self._tuning = tuning
        self._service = service
        self._change = change
        self._path = path
        self._stored = ""
        self._watchers: tuple[Watcher, ...] = ()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read the file, and begin; called on the server's loop."""
        if self._path is not None and self._path.exists():
            self._restore(self._path)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the file and end; settings stay as they are, because the server ends too."""
        await end(self._task)
        await self._store()

    def begin(self, body: Any) -> Experiment:
        """Start an experiment; raises what `Experiments.start` raises."""
        experiment = self.experiments.start(body, self._service.now())
        self._watch(self._tuning.watchers)
        logger.info("experiment %s started: %s", experiment.id, json.dumps(body, sort_keys=True))
        self._wake.set()
        return experiment

    def end(self, experiment_id: str) -> Experiment:
        """Stop an experiment; its setting returns to the control value."""
        experiment = self.experiments.stop(experiment_id, self._service.now())
        self._wake.set()
        return experiment

    def look_again(self) -> None:
        """Wake the task after a change from outside, to do at once what is due."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            change = self._tuning.tick(self._service.now())
            self._watch(self._tuning.watchers)
            if change is not None:
                await self._apply(change)
                continue
            await self._store()
            sleep = min(LONGEST_SLEEP, max(0.0, self._tuning.due() - self._service.now()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), sleep)
            self._wake.clear()

    def _watch(self, watchers: tuple[Watcher, ...]) -> None:
        """Attach only the ``watchers`` that are needed now: a fold over every token reduces throughput."""
        for each in self._watchers:
            if each not in watchers:
                self._service.unwatch(each)
        for each in watchers:
            if each not in self._watchers:
                self._service.watch(each)
        self._watchers = watchers

    async def _apply(self, change: Change) -> None:
        setting, value = change.setting, change.value
        try:
            await self._service.between_steps(lambda: self._change(setting, value))
        except Exception:  # one change that cannot be made must not end the task
            logger.exception("%s cannot be set to %s", setting, value)
        else:
            logger.info("%s is %s: %s", setting, value, change.why)

    def _restore(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_text())
            if stored["version"] != FILE_VERSION:
                raise ValueError(f"version {stored['version']}")
            warnings = self.experiments.restore(stored["experiments"], self._service.now())
        except (OSError, ValueError, KeyError, TypeError) as error:
            aside = path.with_name(f"{path.name}.unreadable")
            logger.warning(
                "experiments of %s are not continued, the file is now %s: %s: %s",
                *(path, aside.name, type(error).__name__, error),
            )
            with suppress(OSError):
                path.replace(aside)
            return
        for warning in warnings:
            logger.warning("%s", warning)

    async def _store(self) -> None:
        if self._path is None:
            return
        experiments = self.experiments.stored(self._service.now())
        text = f'{{"version": {FILE_VERSION}, "experiments": {experiments}}}'
        if text != self._stored:
            self._stored = text
            try:
                await asyncio.to_thread(replace_text, self._path, text, PRIVATE_FILE)
            except OSError as error:
                logger.warning("experiments cannot be written to %s: %s", self._path, error)


def curve_reader(service: Service, measured: Callable[[], MeasuredSteps | None]) -> ReadCurve:
    """Reads what ``measured`` returns between two steps of the engine."""

    def read() -> Generator[None, None, StepCurve | None]:
        try:
            asked = service.thread.call(measured)
            while not asked.done():
                yield
            steps = asked.result()
        except (RuntimeError, CancelledError) as error:
            raise NotEvaluated(f"the step times of the engine cannot be read: {error}") from None
        return None if steps is None else StepCurve.of(steps)

    return read
