from __future__ import annotations

from headrace.compute.adapters.slots import SlotAdapters
from headrace.core.plan import Entry, Row, StepPlan
from headrace.core.request import SamplingParams


class Store:
    """Prepares an adapter as its name and the number of the call."""

    def __init__(self) -> None:
        self.calls = 0

    def prepared(self, name: str) -> str:
        self.calls += 1
        return f"{name} {self.calls}"


def entry(slot: int, adapter: str) -> Entry:
    return Entry(slot, f"r{slot}", (7,), 1, SamplingParams(), 0, frozenset(), (), adapter=adapter)


def plan(entries: tuple[Entry, ...], *slots: int) -> StepPlan:
    return StepPlan(0, entries, (), tuple(Row(slot, 0, 1, (), True) for slot in slots))


def test_rows_have_the_adapters_of_their_sequences_and_of_their_step() -> None:
    adapters = SlotAdapters(Store(), 3)  # type: ignore[arg-type]
    adapters.launched(plan((entry(0, "a"), entry(1, ""), entry(2, "a")), 0, 1, 2))
    adapters.launched(plan((entry(2, ""),), 2, 0))
    adapters.launched(plan((), 1, 2))
    adapters.begin()
    assert adapters.of_rows == ["a 1", None, "a 1"], "prepared once for all rows of a step"
    adapters.begin()
    assert adapters.of_rows == [None, "a 2"], "the slot has another sequence"
    adapters.begin()
    assert not adapters.of_rows, "no row has an adapter"


def test_without_a_store_rows_have_no_adapters() -> None:
    adapters = SlotAdapters()
    adapters.launched(plan((), 0))
    adapters.begin()
    assert not adapters.of_rows
