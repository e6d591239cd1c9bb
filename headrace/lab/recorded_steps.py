"""The steps of a simulated engine and of a recorded scheduler trace, for the step page and trace viewers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.core.drafting.proposal import Drafter
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.ports import Runner
from headrace.core.request import Request
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.lab.replay.exact import Compose, Divergence, Replay, Scene
from headrace.lab.replay.trace import Trace
from headrace.observe.steps.book import StepBook
from headrace.observe.steps.record import Memory, StepRecord, TableKeeper, memory_of
from headrace.observe.steps.timeline import Timeline
from headrace.observe.steps.timelines import Timelines


class RecordedSteps:
    """Replays a trace and keeps the steps ``first`` to ``last``, numbered as in ``headrace replay``.

    At most ``most`` steps are kept; ``cut`` says whether there were more. If the replay differs from the recording,
    ``divergence`` says where, and the steps end there.
    """

    def __init__(
        self, trace: Trace, compose: Compose, first: int = 0, last: int | None = None, most: int = 2000
    ) -> None:
        self.settings: dict[str, Any] = {}
        self.timelines = Timelines(keep=1 << 30)
        self.cut = False
        self.divergence: Divergence | None = None
        self._trace = trace
        self._compose = compose
        self._range = range(first, 1 << 62 if last is None else last + 1)
        self._most = most
        self._book: StepBook | None = None
        self._run()

    @property
    def records(self) -> list[StepRecord]:
        """The steps in order."""
        return [] if self._book is None else self._book.records(most=self._most)

    def requests(self) -> Iterator[tuple[str, Timeline]]:
        """The requests that were open during these steps."""
        records = self.records
        if not records:
            return iter(())
        begin, end = records[0].began, records[-1].ended
        return (
            (name, timeline)
            for name, timeline in self.timelines.items()
            if timeline.arrived <= end and (timeline.end is None or timeline.end >= begin)
        )

    def _run(self) -> None:
        replay = Replay(self._trace, self._engine)
        before: Scene | None = None
        taken, now = 0, -math.inf
        for scene in replay.scenes():
            if scene.step in self._range and taken < self._most:
                taken += 1
                if self._book is None:
                    waiting = before.waiting if before else ()
                    self._book = StepBook(self._most, self._memory, waiting, most_rows=1 << 62)
            elif scene.step in self._range:
                self.cut = True
            now = max(now, scene.now + scene.seconds)
            for event in scene.events:
                self.timelines.fold(event, now)
                if self._book is not None and scene.step in self._range and not self.cut:
                    self._book.fold(event, now)
            before = scene
        self.divergence = replay.divergence

    def _engine(
        self, settings: Mapping[str, Any], runner: Runner, drafter: Drafter | ForcedAcceptance
    ) -> Engine:
        engine = self._compose(settings, runner, drafter)
        pool = engine.scheduler.pool
        self.settings = {
            "max_num_seqs": settings.get("plans", {}).get("max_num_seqs"),
            "max_num_batched_tokens": engine.knobs.batched_tokens,
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
        }
        engine.runner = self._tables = TableKeeper(engine.runner)
        self._pool = pool
        return engine

    def _memory(self) -> Memory:
        running = self._book.running if self._book is not None else frozenset()
        return memory_of(self._pool, self._tables.copied, self._tables.tables(running))


class Camera:
    """A `lab.simulate.replica.Steering` that records the first ``most`` steps and changes nothing.

    It must be created before the engine's first step.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self.book = StepBook(most + 1, self._memory)
        self.timelines = Timelines()
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
            self.timelines.fold(event, now)
            if not self.cut:
                self.book.fold(event, now)
        self.cut = self.cut or self.book.last >= self._most

    def steer(self, engine: Engine, now: float) -> None:
        """Does nothing."""

    def _memory(self) -> Memory:
        return memory_of(self._pool, self._tables.copied, self._tables.tables(self.book.running))
