"""A runner around another one that records the work and time of each step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from headrace.core.plan import StepOutput, StepPlan
from headrace.core.ports import Runner
from headrace.lab.calibration.fit import Measured
from headrace.lab.simulate.work import StepWork, work_of


class StepRecorder:
    """A `core.ports.Runner` that forwards all calls; ``measured`` has an entry per step.

    A step lasts from its launch, or from the end of the previous step if that is later (overlap), to the end of its
    collection. The host's seconds run from the end of a collection to the next launch; call `pause` if the engine was
    idle in between.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.measured: list[Measured] = []
        self._runner = runner
        self._clock = clock
        self._launched: deque[tuple[StepWork, float, float]] = deque()
        self._ended = math.nan

    def pause(self) -> None:
        """The next step does not directly follow the last one."""
        self._ended = math.nan

    def launch(self, plan: StepPlan, now: float) -> None:
        began = self._clock()
        host = math.nan if self._launched else began - self._ended
        self._launched.append((work_of(plan), began, host))
        self._runner.launch(plan, now)

    def collect(self) -> StepOutput:
        output = self._runner.collect()
        ended = self._clock()
        work, began, host = self._launched.popleft()
        before = self._ended if self._ended == self._ended else began
        self.measured.append(Measured(work, ended - max(began, before), host))
        self._ended = ended
        return output
