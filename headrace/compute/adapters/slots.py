"""The adapter of each slot of a runner, and those of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.compute.adapters.store import AdapterStore
from headrace.core.plan import StepPlan


class SlotAdapters:
    """The adapters of ``slots`` sequences, whose places on the device ``store`` knows."""

    def __init__(self, store: AdapterStore, slots: int) -> None:
        self._store = store
        self._named = [""] * slots

    def of(self, plan: StepPlan) -> Sequence[Any]:
        """The prepared adapter of each row (None: it has none); empty if no row has one.

        Call it when the plan is made: a place may be given away while the step is in flight.
        """
        for entry in plan.entries:
            self._named[entry.slot] = entry.adapter
        names = [self._named[row.slot] for row in plan.rows]
        prepared = {name: self._store.prepared(name) for name in set(names) if name}
        return [prepared.get(name) for name in names] if prepared else ()
