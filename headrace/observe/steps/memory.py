"""The states of a pool's blocks: a letter for each block, or for one in every few. Further blocks were never used.

| letter | state of the block |
|---|---|
| ``f`` | free, without content |
| ``c`` | free, its content is in the prefix cache |
| ``u`` | used by one request |
| ``k`` | used by one request, and copied from a block that agreed with its prompt in part |
| ``s`` | shared by several requests |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headrace.core.memory.block_pool import BlockPool
from headrace.core.plan import StepOutput, StepPlan, Tier
from headrace.core.ports import Runner
from headrace.core.sequence import Sequence
from headrace.observe.steps.record import Memory, Table

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
