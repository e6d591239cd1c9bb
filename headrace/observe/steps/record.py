"""One step of an engine as a value: rows, events of requests, waiting requests with reasons, and blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.memory.block_pool import BlockPool
from headrace.core.plan import StepOutput, StepPlan, Tier
from headrace.core.ports import Runner
from headrace.core.sequence import Sequence


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


# The states of a pool's blocks: a letter for each block, or for one in every few. Further blocks were never
# used.
#
# | letter | state of the block |
# |---|---|
# | ``f`` | free, without content |
# | ``c`` | free, its content is in the prefix cache |
# | ``u`` | used by one request |
# | ``k`` | used by one request, and copied from a block that agreed with its prompt in part |
# | ``s`` | shared by several requests |

MOST_CELLS = 1024
"""Maximum number of letters, which limits the cost; with more blocks, one in every few is shown."""

LEAST_CELLS = 512
"""Minimum number of letters: blocks that were never used are included only up to this number."""

MOST_TABLE = 1024
"""Maximum number of blocks of a block table in the result."""


def memory_of(
    pool: BlockPool,
    copied: Collection[int] = (),
    tables: Mapping[str, tuple[int, ...]] | None = None,
    table: Table | None = None,
) -> Memory:
    """The block states of a pool, between two steps. ``copied`` are used blocks whose content was copied.

    ``tables`` and ``table`` are returned unchanged.
    """
    every, states = pool.states(MOST_CELLS)
    cells = []
    for cell, (refs, has_content) in enumerate(states):
        if refs > 1:
            cells.append("s")
        elif refs:
            cells.append("k" if cell * every in copied else "u")
        else:
            cells.append("c" if has_content else "f")
    if every == 1:
        cells += ["f"] * (min(pool.num_blocks, LEAST_CELLS) - len(cells))
    lower = pool.lower
    return Memory(
        pool.num_blocks,
        pool.num_blocks - pool.num_free,
        pool.num_cached,
        len(lower.host) if lower else 0,
        len(lower.disk) if lower and lower.disk else 0,
        "".join(cells),
        every,
        tables or {},
        table,
    )


def table_of(pool: BlockPool, sequence: Sequence, copied: Collection[int]) -> Table:
    """The block table of a sequence, between two steps."""
    blocks, lower = sequence.table, pool.lower
    keys = sequence.keys[: len(blocks)]
    return Table(
        sequence.request.id,
        tuple(blocks[:MOST_TABLE]),
        len(blocks),
        sum(references > 1 for references in pool.references_of(blocks)),
        sum(block in copied for block in blocks),
        sum(key in lower.host for key in keys) if lower else 0,
        sum(key in lower.disk for key in keys) if lower and lower.disk else 0,
    )


def current_memory(
    pool: BlockPool, live: Mapping[str, Sequence], request_id: str, copies: Mapping[str, int]
) -> Memory:
    """The block states, between two steps, with the block table of ``request_id`` if it runs.

    ``copies`` has the place in its table of the block that each of some requests has copied.
    """
    found = ((live[name].table, place) for name, place in copies.items() if name in live)
    copied = {table[place] for table, place in found if place < len(table)}
    sequence = live.get(request_id)
    table = table_of(pool, sequence, copied) if sequence is not None and sequence.table else None
    return memory_of(pool, copied, table=table)


class TableKeeper:
    """A `core.ports.Runner` that forwards all calls; install it before an engine's first step.

    ``copied`` are blocks whose content was copied from another device block since their last allocation.
    """

    def __init__(self, runner: Runner) -> None:
        self.copied: set[int] = set()
        self._runner = runner
        self._slots: dict[int, list[int]] = {}
        self._owners: dict[str, int] = {}  # the last slot of each request

    def launch(self, plan: StepPlan, now: float) -> None:
        for entry in plan.entries:
            self._owners = {name: slot for name, slot in self._owners.items() if slot != entry.slot}
            self._owners[entry.request_id] = entry.slot
            self._slots[entry.slot] = list(entry.blocks)
        for row in plan.rows:
            self._slots[row.slot].extend(row.new_blocks)
            self.copied.difference_update(row.new_blocks)
        for move in plan.moves:
            if move.source_tier is move.target_tier is Tier.DEVICE:
                self.copied.add(move.target)
        self._runner.launch(plan, now)

    def collect(self) -> StepOutput:
        return self._runner.collect()

    def tables(self, running: frozenset[str]) -> dict[str, tuple[int, ...]]:
        """The block tables of running requests."""
        return {name: tuple(self._slots[slot]) for name, slot in self._owners.items() if name in running}
