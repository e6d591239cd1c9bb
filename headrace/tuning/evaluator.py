"""The tuner's evaluator: runs the requests of a period with other settings, in another process.

The server's interpreter is needed for the engine, so a server neither runs nor imports the model of the scheduler. The
process runs `scheduler_model` at the lowest priority. It starts with the first evaluation, and ends when its pipe is
closed, so at the latest with the server.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.tuning.traffic import Outcome, Period

PROGRAM = "headrace.tuning.scheduler_model"
FAILURES = (OSError, EOFError, pickle.UnpicklingError)
"""The errors if the process has ended or cannot be started."""

Evaluate = Callable[[Period, Knobs, StepCurve, int, bool], Generator[None, None, Outcome]]
"""Runs a period with these knobs, measured step times, slots, and with static batches or not; yields until it is done.

It raises `NotEvaluated` if it cannot.
"""

ReadCurve = Callable[[], Generator[None, None, StepCurve | None]]
"""Reads the step times that the engine has measured; yields until it has them. None: they are too few.

It raises `NotEvaluated` if the engine does not answer.
"""


class NotEvaluated(RuntimeError):
    """The evaluator or the engine has failed; a later evaluation may succeed."""


class EvaluatorProcess:
    """Runs one evaluation at a time, of an engine with this ``overlap``; a `api.app.BackgroundWork`."""

    def __init__(self, overlap: int) -> None:
        self._overlap = overlap
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "evaluations")  # writing to a full pipe waits

    def start(self) -> None:
        """Do nothing: the process starts with the first evaluation."""

    async def stop(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=False)
        self._end()

    def evaluate(
        self, period: Period, knobs: Knobs, curve: StepCurve, slots: int, static: bool
    ) -> Generator[None, None, Outcome]:
        """As `Evaluate`. If the process is lost, the next evaluation starts another."""
        asked = self._thread.submit(self._ask, (period, knobs, curve, slots, static, self._overlap))
        while not asked.done():
            yield
        try:
            return asked.result()
        except FAILURES as error:
            raise NotEvaluated(f"the evaluator failed: {type(error).__name__}: {error}") from None

    def _ask(self, asked: tuple[Period, Knobs, StepCurve, int, bool, int]) -> Outcome:
        process, pipe = self._process, subprocess.PIPE
        if process is None:
            command = (sys.executable, "-m", PROGRAM)
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(asked, process.stdin)
            process.stdin.flush()
            outcome: Outcome = pickle.load(process.stdout)
        except FAILURES:
            self._end()
            raise
        return outcome

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def not_evaluated(
    period: Period, knobs: Knobs, curve: StepCurve, slots: int, static: bool
) -> Generator[None, None, Outcome]:
    """An evaluator that is not there: with it, a tuner changes nothing."""
    yield
    raise NotEvaluated("there is no evaluator")


def nothing_measured() -> Generator[None, None, StepCurve | None]:
    """An engine that measures no step times: with it, a tuner changes nothing."""
    yield
    return None
