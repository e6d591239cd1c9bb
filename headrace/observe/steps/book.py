"""A fold that keeps the last steps of an engine, for the page that shows them row by row.

A server attaches it while a page is open. It stores the engine's rows, and converts them
when they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    Event,
    Finished,
    Moved,
    MoveReason,
    Preempted,
    Skipped,
    Stepped,
    Verified,
)
from headrace.observe.reasons import reason_text
from headrace.observe.steps.record import Memory, Note, RowKind, StepRecord, StepRow, Waiting
from headrace.observe.steps.timelines import ARRIVED

MOST_STEPS = 1000
"""Default number of steps to keep."""

MOST_ROWS = 50_000
"""Maximum number of rows over all kept steps."""

MOST_QUEUED = 50
"""Maximum number of waiting requests kept per step, in addition to their total number."""

MOST_NOTES = 1000
"""Maximum number of events kept per step."""

PREEMPTED = "preempted"
"""Start of the waiting reason of a preempted request."""


class _Step(NamedTuple):
    """A stored step: the event with its rows, and further data for the page."""

    event: Stepped
    began: float
    ended: float
    prefills: frozenset[str]
    drafts: dict[str, tuple[int, int]]
    notes: tuple[Note, ...]
    queue: tuple[Waiting, ...]
    memory: Memory | None


class StepBook:
    """A `core.ports.Watcher`.

    ``memory`` returns the states of the blocks after a step; without it, only their numbers are stored. ``waiting`` are
    the requests that already wait, in order, if the book is attached to a running engine.
    """

    fold_tokens = None

    def __init__(
        self,
        most: int = MOST_STEPS,
        memory: Callable[[], Memory] | None = None,
        waiting: Iterable[Waiting] = (),
        most_rows: int = MOST_ROWS,
    ) -> None:
        self._most_rows = most_rows
        self._most = most
        self._memory = memory
        self._steps: deque[_Step] = deque()
        self._rows = 0
        self._ended = 0.0
        self._waiting = {each.request_id: each for each in waiting}
        self._running: set[str] = set()
        self._chunks: dict[str, int] = {}
        self._drafts: dict[str, tuple[int, int]] = {}
        self._notes: list[Note] = []
        self._planned: dict[str, list[Note]] = {}  # of a request's next row, which may be in a later step

    @property
    def running(self) -> frozenset[str]:
        """The requests that were admitted and have not ended since the book began."""
        return frozenset(self._running)

    def fold(self, event: Event, now: float) -> None:
        match event:
            case Stepped():
                self._stepped(event, now)
            case Verified():
                self._drafts[event.request_id] = (event.drafted, event.accepted)
            case Chunked():
                self._chunks[event.request_id] = event.start
            case Skipped():
                self._skipped(event)
            case Admitted():
                self._admitted(event)
            case Moved(reason=MoveReason.RESTORED) if event.request_id:
                facts = {"tier": event.source.value, "blocks": event.blocks}
                self._plan(Note(event.request_id, "restored", facts))
            case Preempted():
                self._preempted(event, now)
            case Finished():
                self._finished(event)
            case Arrived() if event.request_id not in self._running:
                at = now if event.at is None else min(event.at, now)
                self._waiting[event.request_id] = Waiting(event.request_id, at, ARRIVED)
                self._note(Note(event.request_id, "arrived", {"prompt_tokens": event.prompt_tokens}))

    def records(self, after: int = -1, most: int | None = None) -> list[StepRecord]:
        """The kept steps with a number above ``after`` in order, at most the last ``most`` of them."""
        found = [step for step in self._steps if step.event.step > after]
        return [_record(step) for step in (found if most is None else found[-most:])]

    @property
    def last(self) -> int:
        """The number of the newest step; -1 before the first one."""
        return self._steps[-1].event.step if self._steps else -1

    def _note(self, note: Note) -> None:
        if len(self._notes) < MOST_NOTES:
            self._notes.append(note)

    def _plan(self, note: Note) -> None:
        self._planned.setdefault(note.request_id, []).append(note)

    def _skipped(self, event: Skipped) -> None:
        waits = self._waiting.get(event.request_id)
        if waits is not None:
            before = f"{PREEMPTED}; " if waits.reason.startswith(PREEMPTED) else ""
            self._waiting[event.request_id] = waits._replace(reason=before + reason_text(event.reason))

    def _admitted(self, event: Admitted) -> None:
        self._waiting.pop(event.request_id, None)
        self._running.add(event.request_id)
        what = "admitted" if event.reason is AdmitReason.NEW else "resumed"
        facts = {"cached_tokens": event.cached_tokens, "known_tokens": event.known_tokens}
        self._plan(Note(event.request_id, what, facts))

    def _preempted(self, event: Preempted, now: float) -> None:
        self._running.discard(event.request_id)
        why = reason_text(event.reason)
        self._waiting[event.request_id] = Waiting(event.request_id, now, f"{PREEMPTED}: {why}")
        facts = {"lost_tokens": event.lost_tokens, "why": why}
        self._note(Note(event.request_id, "preempted", facts))

    def _finished(self, event: Finished) -> None:
        self._waiting.pop(event.request_id, None)
        self._running.discard(event.request_id)
        self._chunks.pop(event.request_id, None)
        facts = {"reason": event.reason.value, "output_tokens": event.output_tokens}
        self._note(Note(event.request_id, "finished", facts))

    def _stepped(self, event: Stepped, now: float) -> None:
        ids = event.work.request_ids
        prefills = []
        for name, row in zip(ids, event.work.rows, strict=True):
            if self._chunks.get(name) == row.start:
                del self._chunks[name]
                prefills.append(name)
            elif row.length - len(row.drafts) > 1:
                prefills.append(name)
        if self._planned:
            for name in ids:
                self._notes += self._planned.pop(name, ())
            self._planned = {name: notes for name, notes in self._planned.items() if name in self._running}
        self._steps.append(
            _Step(
                event,
                max(event.work.began, self._ended),
                now,
                frozenset(prefills),
                self._drafts,
                tuple(self._notes),
                tuple(islice(self._waiting.values(), MOST_QUEUED)),
                self._memory() if self._memory else None,
            )
        )
        self._ended, self._drafts, self._notes = now, {}, []
        self._rows += len(ids)
        while len(self._steps) > self._most or (self._rows > self._most_rows and len(self._steps) > 1):
            self._rows -= len(self._steps.popleft().event.work.rows)


def _record(step: _Step) -> StepRecord:
    event, drafts = step.event, step.drafts
    rows = tuple(
        StepRow(
            name,
            RowKind.PREFILL if name in step.prefills else RowKind.DECODE,
            row.start,
            row.length,
            row.new_blocks,
            *drafts.get(name, (0, 0)),
        )
        for name, row in zip(event.work.request_ids, event.work.rows, strict=True)
    )
    return StepRecord(
        event.step,
        step.began,
        step.ended,
        rows,
        step.notes,
        step.queue,
        event.running,
        event.waiting,
        event.blocks_held,
        event.blocks_total,
        step.memory,
    )
