"""All that the core asks of the world."""

from __future__ import annotations

from typing import Protocol

from headrace.core.events import Event
from headrace.core.plan import StepOutput, StepPlan


class Runner(Protocol):
    """Turns plans into tokens: the torch runner, the simulator, or a test double.

    Plans are executed in the order of their launch; `collect` returns the output of the oldest plan not yet
    collected and blocks until it is there. A runner fails a single row through `StepOutput.failures`; what it
    raises ends the engine.
    """

    def launch(self, plan: StepPlan, now: float) -> None: ...

    def collect(self) -> StepOutput: ...


class Watcher(Protocol):
    """A fold over the event stream."""

    def fold(self, event: Event, now: float) -> None: ...
