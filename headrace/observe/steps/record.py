"""One step of an engine as a value: rows, events of requests, waiting requests with reasons, and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class RowKind(StrEnum):
    """What a row computes: a part of a prompt, or the next token (with drafts: several)."""

    PREFILL = "prefill"
    DECODE = "decode"


class StepRow(NamedTuple):
    """A row: positions ``[start, start + length)`` of a request; ``accepted`` of ``drafted`` tokens were accepted."""

    request_id: str
    kind: RowKind
    start: int
    length: int
    new_blocks: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0

    def shown(self) -> dict[str, Any]:
        """The row as plain values, without fields that are 0 or empty."""
        shown: dict[str, Any] = {
            "id": self.request_id,
            "kind": self.kind.value,
            "start": self.start,
            "length": self.length,
        }
        if self.new_blocks:
            shown["new_blocks"] = list(self.new_blocks)
        if self.drafted:
            shown |= {"drafted": self.drafted, "accepted": self.accepted}
        return shown


class Note(NamedTuple):
    """Something that happened to a request in a step; ``facts`` are plain values."""

    request_id: str
    event: str
    facts: Mapping[str, Any]


class Waiting(NamedTuple):
    """A request that has waited since ``since``, and the last reason for it."""

    request_id: str
    since: float
    reason: str


class Table(NamedTuple):
    """The block table of a running request: the first ``blocks``, and the numbers of all blocks and of each kind.

    ``host`` and ``disk`` count blocks whose content is also in a lower tier.
    """

    request_id: str
    blocks: tuple[int, ...]
    total: int
    shared: int
    copied: int
    host: int
    disk: int


class Memory(NamedTuple):
    """Blocks by state. ``cells`` has a letter for one in ``blocks_per_cell`` blocks (see `memory`); blocks beyond the
    last cell were never used.

    ``tables`` are the block tables of the running requests, if known. ``table`` is that of the requested request.
    """

    total: int
    held: int
    cached: int
    host: int
    disk: int
    cells: str
    blocks_per_cell: int
    tables: Mapping[str, tuple[int, ...]] = {}
    table: Table | None = None


class StepRecord(NamedTuple):
    """A finished step. ``began`` is its planning, or the end of the previous step if later.

    ``queue`` are the first waiting requests, ``waiting`` is the number of all. ``memory`` is None if only the numbers
    of blocks are known.
    """

    step: int
    began: float
    ended: float
    rows: tuple[StepRow, ...]
    notes: tuple[Note, ...]
    queue: tuple[Waiting, ...]
    running: int
    waiting: int
    blocks_held: int
    blocks_total: int
    memory: Memory | None = None

    def shown(self, origin: float = 0.0) -> dict[str, Any]:
        """The step as plain values for JSON; times are seconds since ``origin``."""
        shown: dict[str, Any] = {
            "step": self.step,
            "began": round(self.began - origin, 6),
            "ended": round(self.ended - origin, 6),
            "running": self.running,
            "waiting": self.waiting,
            "blocks_held": self.blocks_held,
            "blocks_total": self.blocks_total,
            "rows": [row.shown() for row in self.rows],
            "events": [{"id": note.request_id, "event": note.event, **note.facts} for note in self.notes],
            "queue": [
                {"id": each.request_id, "since": round(each.since - origin, 6), "why": each.reason}
                for each in self.queue
            ],
        }
        if self.memory is not None:
            shown["memory"] = memory_shown(self.memory)
        return shown


def memory_shown(memory: Memory) -> dict[str, Any]:
    """The blocks as plain values for JSON."""
    return memory._asdict() | {
        "tables": {name: list(table) for name, table in memory.tables.items()},
        "table": memory.table and memory.table._asdict(),
    }
