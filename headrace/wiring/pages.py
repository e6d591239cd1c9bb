"""The pages in the browser: the dashboard, the steps of the server, and timelines of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.api.compile.model import ServedModel
from headrace.api.operations.requests import Explain, RequestTimeline
from headrace.api.operations.steps import StepRoutes
from headrace.api.pages import Broadcast, Pages
from headrace.api.serving import CallNotes
from headrace.config import Options
from headrace.core.ports import Watcher
from headrace.lab.tour import Asked, Scenario
from headrace.observe.dashboard import Dashboard, TenantTable
from headrace.observe.readings import Folds
from headrace.observe.steps.book import StepBook
from headrace.observe.steps.document import document, trace
from headrace.observe.steps.record import memory_shown
from headrace.observe.steps.timelines import Timelines
from headrace.service.quota_meter import limits_of
from headrace.service.service import Service
from headrace.wiring.controls import Controls
from headrace.wiring.model import ReadyModel, parameter_counts

LEASE_SECONDS = 15.0
"""How long the fold stays attached after it was last read."""

FoldT = TypeVar("FoldT", bound=Watcher)


class StepWatch(Generic[FoldT]):
    """Attaches the fold that ``make`` creates to the service only while it is read: it costs nothing otherwise.

    It runs on the event loop of the service.
    """

    def __init__(self, service: Service, make: Callable[[], FoldT], seconds: float = LEASE_SECONDS) -> None:
        self._service = service
        self._make = make
        self._seconds = seconds
        self._fold: FoldT | None = None
        self._end: asyncio.TimerHandle | None = None

    @property
    def attached(self) -> bool:
        """Whether the fold receives events."""
        return self._fold is not None

    def look(self) -> FoldT:
        """The fold, with all steps that have ended. It is attached if it was not, and stays so for ``seconds``."""
        self._service.count()
        if self._fold is None:
            self._fold = self._make()
            self._service.watch(self._fold)
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(self._seconds, self._leave)
        return self._fold

    def _leave(self) -> None:
        if self._fold is not None:
            self._service.unwatch(self._fold)
        self._fold = self._end = None


# Builds the endpoints for the steps of a server and the timelines of its requests.

MEMORY_SECONDS = 1.0
"""Maximum wait for the end of the current step, after which the blocks are counted."""


class LiveSteps:
    """The steps of a server, which are recorded only while they are read."""

    def __init__(
        self, controls: Controls, service: Service, timelines: Timelines, settings: Mapping[str, Any]
    ) -> None:
        self._controls = controls
        self._service = service
        self._timelines = timelines
        self._settings = settings
        self._began = service.now()
        self._watch = StepWatch(service, lambda: StepBook(waiting=timelines.waiting()))

    async def read(self, after: int, limit: int, form: str, request_id: str) -> Mapping[str, Any]:
        """The last steps with a number above ``after``; as ``json`` with the current state of the blocks.

        If ``request_id`` names a running request, its block table is included.
        """
        book = self._watch.look()
        records = book.records(after, limit)
        if form == "perfetto":
            now = self._service.now()
            return trace(records, self._timelines.items(), now, since=records[0].began if records else now)
        named = {row.request_id for record in records for row in record.rows}
        named |= {note.request_id for record in records for note in record.notes}
        timelines = [
            (name, timeline) for name in named if (timeline := self._timelines.get(name)) is not None
        ]
        shown = document("server", records, timelines, self._settings, origin=self._began)
        return shown | {"memory": await self._memory(request_id)}

    async def _memory(self, request_id: str) -> dict[str, Any] | None:
        copies = self._timelines.copies(self._settings["block_size"])
        ask = self._service.between_steps(lambda: self._controls.memory(request_id, copies))
        try:
            return memory_shown(await asyncio.wait_for(ask, MEMORY_SECONDS))
        except TimeoutError:  # a long step, or a stalled engine
            return None


class Stepping(NamedTuple):
    """The endpoints that show steps and timelines."""

    steps: StepRoutes
    timeline: RequestTimeline


def make_stepping(
    controls: Controls,
    service: Service,
    notes: CallNotes,
    timelines: Timelines,
    explain: Explain,
    settings: Mapping[str, Any],
) -> Stepping:
    """The endpoints of a server. ``timelines`` is one of its folds; ``settings`` are shown with its steps."""

    def timeline(request_id: str, now: float) -> dict[str, Any] | None:
        timeline = timelines.get(request_id)
        return None if timeline is None else timeline.shown(now)

    def traced(request_ids: Sequence[str], now: float) -> Mapping[str, Any]:
        found = [(each, timeline) for each in request_ids if (timeline := timelines.get(each)) is not None]
        return trace((), found, now)

    # The simulator is imported on first use, because it would lengthen the start of every server.
    def simulate(body: Mapping[str, Any], form: str) -> Mapping[str, Any]:
        from headrace.wiring.step_documents import simulated_steps

        requests = tuple(Asked(**each) for each in body["requests"])
        return simulated_steps(Scenario(**{**body, "requests": requests}), form)

    def tour() -> list[dict[str, Any]]:
        from headrace.wiring import step_documents

        return step_documents.tour()

    return Stepping(
        StepRoutes(LiveSteps(controls, service, timelines, settings).read, simulate, tour),
        RequestTimeline(service, notes, explain=explain, timeline=timeline, trace=traced),
    )


def make_pages(
    loaded: ReadyModel, options: Options, model: ServedModel, service: Service, notes: CallNotes, folds: Folds
) -> tuple[Pages, StepRoutes, RequestTimeline]:
    """The pages, and the steps and timelines that they show."""
    settings = {
        "model": loaded.name,
        "scheduling_policy": loaded.policy,
        "max_num_seqs": options.scheduler.max_num_seqs,
        "max_num_batched_tokens": loaded.controls.knobs.batched_tokens,
        "num_blocks": loaded.ledger.num_blocks,
        "block_size": loaded.ledger.block_size,
    }
    steps = make_stepping(loaded.controls, service, notes, folds.timelines, folds.explain, settings)
    return (_make_dashboard(loaded, options, model, service, folds), *steps)


def _make_dashboard(
    loaded: ReadyModel, options: Options, model: ServedModel, service: Service, folds: Folds
) -> Pages:
    """The pages of one engine. The event loop's thread makes the snapshots, so its CPU time is the loop's."""
    most, controls = options.scheduler.max_num_seqs, loaded.controls

    def slots() -> int:
        return min(most, controls.knobs.max_running or most)

    def weight(tenant: str) -> float:
        return model.rules.tenants.terms(tenant).weight

    def limits(tenant: str) -> Mapping[str, Mapping[str, float]]:
        return limits_of(service.meter.rooms(tenant, service.now()))

    dashboard = Dashboard(
        folds,
        TenantTable(folds.usage, folds.goodput, folds.cost, weight, limits),
        slots=slots,
        blocks=loaded.ledger.num_blocks,
        parameters=parameter_counts(loaded.shape),
        loop_seconds=time.thread_time,
        offset=time.time() - time.monotonic(),
    )
    return Pages(Broadcast(service, dashboard))
