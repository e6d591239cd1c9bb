"""Steps of small simulations, the guided tour and recordings, as values, JSON documents and traces, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.drafting.proposal import Drafter
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.ports import Runner
from headrace.core.request import Request
from headrace.core.scheduler.routing import LeastLoaded
from headrace.core.tenancy.gate import Limits
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.lab.plan.roofline import BFLOAT16, SHAPES, Replica, device
from headrace.lab.replay.exact import Compose, Divergence, Replay, Scene
from headrace.lab.replay.trace import Trace
from headrace.lab.simulate.fleet import Fleet, SimulatedReplica
from headrace.lab.simulate.tally import Tally
from headrace.lab.tour import BLOCK_SIZE, STOPS, BadScenario, Scenario
from headrace.observe.steps.book import StepBook
from headrace.observe.steps.document import document, trace
from headrace.observe.steps.record import Memory, StepRecord, TableKeeper, memory_of
from headrace.observe.steps.timelines import Timeline, Timelines
from headrace.wiring.simulation import make_replica, roofline_machine


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
    """A `lab.simulate.fleet.Steering` that records the first ``most`` steps and changes nothing.

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


MODEL, DEVICE = "llama-3.1-8b", "H100-SXM"
"""The simulated model and device of the page."""

MOST_STEPS = 1000
"""Maximum steps of a simulation that are returned."""


def simulated_steps(scenario: Scenario, form: str = "json") -> dict[str, Any]:
    """Simulate a scenario; returns its steps as a document for the page, or as a trace (``perfetto``).

    Raises:
        BadScenario: a request does not fit into the blocks.
    """
    needed = -(-scenario.max_model_len // BLOCK_SIZE)
    if needed > scenario.num_blocks:
        raise BadScenario("num_blocks", f"must be at least {needed}: the longest request needs as many")
    drafts = None
    if scenario.num_speculative_tokens:
        config = {
            "method": "ngram",
            "num_speculative_tokens": scenario.num_speculative_tokens,
            "adaptive": False,
        }
        drafts = json.dumps(config)
    replica = Replica(SHAPES[MODEL], device(DEVICE), 1, BFLOAT16)
    cache = CacheOptions(
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=scenario.num_blocks * BLOCK_SIZE * replica.kv_bytes_per_token,
        enable_prefix_caching=scenario.enable_prefix_caching,
    )
    plans = SchedulerOptions(
        scheduling_policy=scenario.scheduling_policy,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        enable_chunked_prefill=scenario.enable_chunked_prefill,
        speculative_config=drafts,
        overlap=0,
    )
    machine = roofline_machine(replica, cache, plans, scenario.max_model_len)
    tally, answers = Tally(plans.max_num_seqs), dict[str, tuple[int, ...]]()
    engine, runner = make_replica(plans, cache, machine, answers)
    camera = Camera(engine, MOST_STEPS)
    engine_alone = SimulatedReplica(engine, runner, tally, answers, machine.front, camera)
    Fleet([engine_alone], LeastLoaded(), Limits(1 << 62, 1 << 62), tally, answers).run(scenario.simulated())
    if form == "perfetto":
        return trace(camera.records, camera.timelines.items())
    settings = {name: value for name, value in asdict(scenario).items() if name != "requests"}
    settings |= {"block_size": BLOCK_SIZE, "model": MODEL, "device": DEVICE}
    return document("simulation", camera.records, camera.timelines.items(), settings, cut=camera.cut)


def tour() -> list[dict[str, Any]]:
    """The stops of the guided tour as JSON values; each run has the body of a simulation."""
    return [
        {
            "name": stop.name,
            "title": stop.title,
            "text": stop.text,
            "look_at": stop.look_at,
            "runs": [{"caption": caption, "scenario": _body(scenario)} for caption, scenario in stop.runs],
        }
        for stop in STOPS
    ]


def _body(scenario: Scenario) -> dict[str, Any]:
    return asdict(scenario) | {"requests": [asdict(each) for each in scenario.requests]}


def recorded_steps(steps: RecordedSteps) -> dict[str, Any]:
    """The steps of a recording as a document for the page."""
    return document("recording", steps.records, steps.requests(), steps.settings, cut=steps.cut)


def recorded_trace(steps: RecordedSteps) -> dict[str, Any]:
    """The steps of a recording as a trace."""
    return trace(steps.records, steps.requests())
