"""Builds the endpoints for the steps of a server and the timelines of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.api.generation.call_notes import CallNotes
from headrace.api.operations.owned_requests import Explain
from headrace.api.operations.steps import StepRoutes
from headrace.api.operations.timeline import RequestTimeline
from headrace.core.engine import Engine
from headrace.lab.tour import Asked, Scenario
from headrace.observe.steps.book import StepBook
from headrace.observe.steps.film import film
from headrace.observe.steps.memory import memory_of, table_of
from headrace.observe.steps.perfetto import trace
from headrace.observe.steps.record import Memory, memory_shown
from headrace.observe.steps.timelines import Timelines
from headrace.service.service import Service
from headrace.service.step_watch import StepWatch

MEMORY_SECONDS = 1.0
"""Maximum wait for the end of the current step, after which the blocks are counted."""


class LiveSteps:
    """The steps of a server, which are recorded only while they are read."""

    def __init__(
        self, engine: Engine, service: Service, lives: Timelines, settings: Mapping[str, Any]
    ) -> None:
        self._scheduler = engine.scheduler
        self._service = service
        self._lives = lives
        self._settings = settings
        self._began = service.now()
        self._watch = StepWatch(service, lambda: StepBook(waiting=lives.waiting()))

    async def read(self, after: int, limit: int, form: str, request_id: str) -> Mapping[str, Any]:
        """The last steps with a number above ``after``; as ``json`` with the current state of the blocks.

        If ``request_id`` names a running request, its block table is included.
        """
        book = self._watch.look()
        records = book.records(after, limit)
        if form == "perfetto":
            now = self._service.now()
            return trace(records, self._lives.lives(), now, since=records[0].began if records else now)
        named = {row.request_id for record in records for row in record.rows}
        named |= {note.request_id for record in records for note in record.notes}
        lives = [(name, life) for name in named if (life := self._lives.get(name)) is not None]
        shown = film("server", records, lives, self._settings, origin=self._began)
        return shown | {"memory": await self._memory(request_id)}

    async def _memory(self, request_id: str) -> dict[str, Any] | None:
        copies = self._lives.copies(self._scheduler.pool.block_size)
        ask = self._service.between_steps(lambda: self._blocks(request_id, copies))
        try:
            return memory_shown(await asyncio.wait_for(ask, MEMORY_SECONDS))
        except TimeoutError:  # a long step, or a stalled engine
            return None

    def _blocks(self, request_id: str, copies: Mapping[str, int]) -> Memory:
        """The current blocks; ``copies`` has places in block tables. Runs on the engine thread."""
        live, pool = self._scheduler.live, self._scheduler.pool
        found = ((live[name].table, place) for name, place in copies.items() if name in live)
        copied = {table[place] for table, place in found if place < len(table)}
        sequence = live.get(request_id)
        table = table_of(pool, sequence, copied) if sequence is not None and sequence.table else None
        return memory_of(pool, copied, table=table)


class Stepping(NamedTuple):
    """The endpoints that show steps and timelines."""

    steps: StepRoutes
    timeline: RequestTimeline


def make_stepping(
    engine: Engine,
    service: Service,
    notes: CallNotes,
    lives: Timelines,
    explain: Explain,
    settings: Mapping[str, Any],
) -> Stepping:
    """The endpoints of a server. ``lives`` is one of its folds; ``settings`` are shown with its steps."""

    def timeline(request_id: str, now: float) -> dict[str, Any] | None:
        life = lives.get(request_id)
        return None if life is None else life.shown(now)

    def traced(request_ids: Sequence[str], now: float) -> Mapping[str, Any]:
        found = [(each, life) for each in request_ids if (life := lives.get(each)) is not None]
        return trace((), found, now)

    # The simulator is imported on first use, because it would lengthen the start of every server.
    def simulate(body: Mapping[str, Any], form: str) -> Mapping[str, Any]:
        from headrace.wiring.films import simulated_steps

        requests = tuple(Asked(**each) for each in body["requests"])
        return simulated_steps(Scenario(**{**body, "requests": requests}), form)

    def tour() -> list[dict[str, Any]]:
        from headrace.wiring import films

        return films.tour()

    return Stepping(
        StepRoutes(LiveSteps(engine, service, lives, settings).read, simulate, tour),
        RequestTimeline(service, notes, explain=explain, timeline=timeline, trace=traced),
    )
