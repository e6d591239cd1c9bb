"""A runner that wraps the engine's runner and records block tables and copied blocks."""

from __future__ import annotations

from headrace.core.plan import StepOutput, StepPlan, Tier
from headrace.core.ports import Runner


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
