"""A runner between an engine and its own runner that keeps the block tables and the copied blocks for pictures."""

from __future__ import annotations

from headrace.core.plan import StepOutput, StepPlan, Tier
from headrace.core.ports import Runner


class TableKeeper:
    """A `core.ports.Runner` that passes everything on; use it from an engine's first step on.

    ``copied`` are blocks whose content was copied from another block of the device since they were last allocated.
    """

    def __init__(self, runner: Runner) -> None:
        self.copied: set[int] = set()
        self._runner = runner
        self._slots: dict[int, list[int]] = {}
        self._owners: dict[str, int] = {}  # the slot of each request that has had one

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
