"""The tuner of a server whose engine has a process of its own: threads over the hashing runner, one after the other."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import Options, TuningOptions
from headrace.core.events import EngineLost
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import Request, SamplingParams
from headrace.service.engine_host import EngineHost
from headrace.service.engine_process import FromEngine
from headrace.service.packing import frame, packed
from headrace.testing.engines import hashing_engine
from headrace.tuning import tuner as tuner_module
from headrace.tuning.live import LiveTuning
from headrace.tuning.search import METRIC
from headrace.tuning.traffic import Outcome, Period
from headrace.wiring import tuning as module
from headrace.wiring.controls import EngineCounts, LocalControls, RemoteControls, answer
from headrace.wiring.engine_process import LASTING
from headrace.wiring.tuning import make_tuning
from tests.doubles.engine_processes import Mortal, Seen, Successors, read, running
from tests.doubles.services import SOON
from tests.wiring.test_controls import local

pytestmark = pytest.mark.anyio

START = 0.7
WINDOW = 0.05


class Processes(Successors):
    """Engine processes that learn step times; `kill` ends the newest one."""

    lasting = LASTING

    def __init__(self) -> None:
        super().__init__(make=self.engine)
        self.controls: list[LocalControls] = []
        self.connections: list[Mortal] = []

    def engine(self) -> Any:
        times = StepTimes()
        made = hashing_engine(knobs=Knobs(mixed_prefill_ratio=START), times=times, overlap=1)[0]
        made.times = times
        self.controls.append(local(made))
        return made

    def run(self, number: int, connection: Mortal) -> None:
        controls = self.controls[number]
        self.connections.append(connection)
        if number:
            with suppress(OSError):  # the server may have stopped
                connection.sendall(frame((FromEngine.DESCRIBED, number)))
        host = EngineHost(
            connection,  # type: ignore[arg-type]
            self.engines[number],
            partial(self.answered, number),
            lambda: packed(EngineCounts, controls.counts),
        )
        host.closed("") if host.run() else connection.close()

    def answered(self, number: int, name: str, arguments: Any) -> Any:
        self.asked[number].append(name)
        return answer(self.controls[number], name, arguments)

    def accept(self, description: int) -> Any:
        return packed(EngineCounts, self.controls[description].counts)

    def kill(self) -> None:
        self.connections[-1].inner.shutdown(socket.SHUT_RDWR)


class Rehearsals:
    """In place of the evaluator's process: a larger ratio of prompts is always faster."""

    def __init__(self, overlap: int) -> None:
        self.curves: list[StepCurve] = []

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def evaluate(
        self, period: Period, knobs: Knobs, curve: StepCurve, slots: int, static: bool
    ) -> Generator[None, None, Outcome]:
        self.curves.append(curve)
        yield
        seconds = knobs.mixed_prefill_ratio**-0.5
        return Outcome(seconds, 0.0, 0.0, 1000, 100 * seconds, 0.0, 0.0)


class House:
    def __init__(self, service: Any, process: Any, seen: Seen, processes: Processes, mode: str) -> None:
        self.service, self.seen, self.processes = service, seen, processes
        process.counts = packed(EngineCounts, processes.controls[0].counts)
        self.controls = RemoteControls(process, processes.engines[0].knobs, 1, False)
        lookup: Any = SimpleNamespace(service=service, assigned=None)
        nothing: Any = None
        options = Options(tuning=TuningOptions(tuner=mode, tuner_window=WINDOW))  # type: ignore[arg-type]
        made = make_tuning(options, self.controls, lookup, nothing, nothing)
        self.rehearsals: Any = made.tasks[0]
        self.task: LiveTuning = made.tasks[1]
        self.tuner = self.task._tuning.tuner
        self.set_mode = made.endpoints[1]._set_mode
        self.numbers = itertools.count()

    def told(self, words: str) -> int:
        return sum(words in note.what for note in self.tuner.notes)

    async def load_until(self, condition: Callable[[], object]) -> None:
        """Send requests until ``condition`` holds; all of them are answered."""
        until = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < until, [note.what for note in self.tuner.notes]
            number = next(self.numbers)
            request = Request(f"r{number}", (1, 2, number), SamplingParams(max_tokens=8))
            answered = self.service.open([request])
            assert (await read(answered))[-1].output_tokens == 8
            self.service.close(answered)


@asynccontextmanager
async def house(monkeypatch: pytest.MonkeyPatch, mode: str) -> AsyncIterator[House]:
    monkeypatch.setattr(module, "EvaluatorProcess", Rehearsals)
    # Each change is measured as it was rehearsed, however busy the machine is.
    monkeypatch.setattr(tuner_module, "errors_of", lambda measured, own: {METRIC: 0.0})
    processes = Processes()
    async with running(processes) as (service, process, seen):
        made = House(service, process, seen, processes, mode)
        made.task.start()
        try:
            yield made
        finally:
            await made.task.stop()


async def test_the_tuner_changes_settings_of_a_process_from_the_steps_that_it_measured(monkeypatch) -> None:
    async with house(monkeypatch, "on") as h:
        (engine,) = h.processes.engines
        await h.load_until(lambda: h.controls.knobs.mixed_prefill_ratio > START)
        assert h.controls.knobs == engine.knobs
        assert h.told("rehearsed")
        steps = engine.times.curve.measured()
        (first, *_) = h.rehearsals.curves
        assert first.measured().cells.keys() <= steps.cells.keys()
        assert sum(each.steps for each in first.measured().cells.values()) > 0
        await h.load_until(lambda: h.told("kept"))


async def test_advice_changes_nothing_and_the_mode_changes_while_it_runs(monkeypatch) -> None:
    async with house(monkeypatch, "advise") as h:
        (engine,) = h.processes.engines
        await h.load_until(lambda: h.told("not made"))
        assert engine.knobs.mixed_prefill_ratio == h.controls.knobs.mixed_prefill_ratio == START
        assert "set_knobs" not in h.processes.asked[0]
        h.set_mode("on")
        await h.load_until(lambda: engine.knobs.mixed_prefill_ratio > START)
        h.set_mode("off")
        await h.load_until(lambda: not h.tuner.report()["probation"])
        read_before = h.processes.asked[0].count("measured_steps")
        await asyncio.sleep(10 * WINDOW)
        assert h.processes.asked[0].count("measured_steps") == read_before


async def test_the_tuner_goes_on_with_the_next_process_which_has_its_settings(monkeypatch) -> None:
    async with house(monkeypatch, "on") as h:
        await h.load_until(lambda: h.told("rehearsed"))
        h.processes.kill()
        await h.load_until(lambda: h.told("kept"))
        h.processes.kill()
        await h.load_until(lambda: len(h.processes.engines) == 3 and "measured_steps" in h.processes.asked[2])
        await h.load_until(lambda: h.processes.engines[2].knobs == h.controls.knobs)
        assert h.controls.knobs.mixed_prefill_ratio > START
        assert [names[0] for names in h.processes.asked[1:]] == ["set_knobs"] * 2
        h.service.count()
        assert len(h.seen.of(EngineLost)) == 2
