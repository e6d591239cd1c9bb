"""Records every step of a simulated engine: rows, block tables, the state of each block, and the queue."""

from __future__ import annotations

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.request import Request
from headrace.observe.steps.book import StepBook
from headrace.observe.steps.memory import memory_of
from headrace.observe.steps.record import Memory, StepRecord
from headrace.observe.steps.tables import TableKeeper
from headrace.observe.steps.timelines import Timelines


class Camera:
    """A `lab.simulate.replica.Steering` that records the first ``most`` steps and changes nothing.

    It must be created before the engine's first step.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self.book = StepBook(most + 1, self._memory)
        self.lives = Timelines()
        self.cut = False
        self._most = most
        self._pool = engine.scheduler.pool
        engine.runner = self._tables = TableKeeper(engine.runner)

    @property
    def records(self) -> list[StepRecord]:
        """The steps in order."""
        return self.book.records()[: self._most]

    def assigned(self, request: Request) -> Request:
        """Returns the request unchanged."""
        return request

    def saw(self, events: list[Event], now: float) -> None:
        """Records the events of a finished step."""
        for event in events:
            self.lives.fold(event, now)
            if not self.cut:
                self.book.fold(event, now)
        self.cut = self.cut or self.book.last >= self._most

    def steer(self, engine: Engine, now: float) -> None:
        """Does nothing."""

    def _memory(self) -> Memory:
        return memory_of(self._pool, self._tables.copied, self._tables.tables(self.book.running))
