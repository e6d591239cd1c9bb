"""Adapters in host memory and in the places of the device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.compute.adapters.store import AGAIN_SECONDS, WAITED_SECONDS, AdapterStore, SlotAdapters
from headrace.core.adapters import AdapterError, AdapterLost
from headrace.core.events import SkipReason
from headrace.core.plan import Entry, Row, StepPlan
from headrace.core.request import SamplingParams
from tests.compute.adapters.test_files import ALL, LAYOUT
from tests.doubles.adapters import write_adapter
from tests.waiting import eventually


class Bench:
    """A store whose preparing may be held up, and a clock."""

    def __init__(self, places: int, host: int) -> None:
        self.now, self.go, self.prepared = 0.0, threading.Event(), 0
        self.go.set()
        self.store = AdapterStore(
            LAYOUT,
            self._prepare,
            torch.float32,
            max_rank=16,
            places=places,
            host=host,
            clock=lambda: self.now,
        )

    def _prepare(self, layers: Any) -> Any:
        assert self.go.wait(10)
        self.prepared += 1
        return layers

    def bring(self, adapter: str, *used: str) -> None:
        """Ask for an adapter until it is on the device, and start a request with it."""
        eventually(lambda: self.store.hold(adapter, lambda: {*used}) is None)
        assert self.store.prepared(adapter)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_adapter(tmp_path / str(seed), ALL, seed=seed) for seed in range(4)]


def test_an_adapter_comes_to_the_device_beside_the_caller(folders: list[Path]) -> None:
    bench = Bench(1, 1)
    adapter = bench.store.add(folders[0])
    bench.go.clear()
    for _ in range(3):
        assert bench.store.hold(adapter, set) is SkipReason.ADAPTER_LOADING
    bench.go.set()
    bench.bring(adapter)
    assert bench.prepared == 1
    bench.store.close()


def test_the_least_recently_used_place_is_given_away(folders: list[Path]) -> None:
    bench = Bench(2, 4)
    one, two, three, four = map(bench.store.add, folders)
    bench.bring(one)
    bench.bring(two)
    bench.bring(one)
    bench.bring(three)
    assert bench.store.hold(one, set) is None
    assert bench.prepared == 3
    bench.bring(four)  # in the place of the third: the first was asked for since
    assert bench.store.hold(one, set) is None
    assert bench.prepared == 4
    bench.store.close()


def test_adapters_of_running_requests_keep_their_places(folders: list[Path]) -> None:
    bench = Bench(2, 4)
    one, two, three, _ = map(bench.store.add, folders)
    bench.bring(one)
    bench.bring(two, one)
    assert bench.store.hold(three, lambda: {"", one, two}) is SkipReason.NO_ADAPTER_PLACE
    bench.bring(three, "", two)
    assert bench.store.hold(two, set) is None
    assert bench.prepared == 3
    bench.store.close()


def test_a_place_waits_for_the_request_that_asked_for_it(folders: list[Path]) -> None:
    """Two requests with two adapters and one place do not take it from each other by turns."""
    bench = Bench(1, 2)
    one, two, *_ = map(bench.store.add, folders)
    eventually(lambda: bench.store.hold(one, set) is None)
    assert bench.store.hold(two, set) is SkipReason.ADAPTER_LOADING
    assert bench.store.hold(one, set) is None
    bench.now += WAITED_SECONDS  # its request has been cancelled
    bench.bring(two)
    assert bench.prepared == 2
    bench.store.close()


def test_host_memory_is_bounded_and_files_are_compared_when_read_again(
    folders: list[Path], tmp_path: Path
) -> None:
    bench = Bench(1, 1)
    one = bench.store.add(folders[0])
    two = bench.store.add(folders[1])
    assert list(bench.store._host) == [two]
    bench.bring(one)  # read again
    bench.bring(two)
    write_adapter(folders[0], ALL, seed=9)
    eventually(lambda: lost(bench, one) != "")
    assert "have changed since it was loaded" in lost(bench, one)
    assert str(tmp_path) not in lost(bench, one)
    other = bench.store.add(folders[0])
    assert other != one
    bench.bring(other)
    bench.store.close()


def lost(bench: Bench, adapter: str) -> str:
    try:
        bench.store.hold(adapter, set)
    except AdapterLost as error:
        return str(error)
    return ""


def test_an_unloaded_adapter_still_serves_requests_that_wait(folders: list[Path]) -> None:
    bench = Bench(1, 1)
    one = bench.store.add(folders[0])
    bench.store.retire(one)
    bench.bring(one)
    bench.store.close()


def test_the_oldest_of_many_unloaded_adapters_are_forgotten(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.compute.adapters.store.MAX_RETIRED", 2)
    bench = Bench(1, 4)
    each = [bench.store.add(folder) for folder in folders]
    for adapter in each[:3]:
        bench.store.retire(adapter)
    assert "unloaded long before" in lost(bench, each[0])
    bench.bring(each[1])
    bench.store.close()


def test_a_fault_of_the_device_ends_only_the_requests_of_the_adapter(folders: list[Path]) -> None:
    bench = Bench(2, 2)

    def fail(layers: Any) -> Any:
        raise RuntimeError("out of memory")

    one, two, *_ = map(bench.store.add, folders)
    bench.bring(two)
    bench.store._prepare = fail
    eventually(lambda: lost(bench, one) != "")
    assert bench.store.hold(two, set) is None
    bench.store._prepare = bench._prepare
    assert lost(bench, one) == "out of memory"
    bench.now += AGAIN_SECONDS
    bench.bring(one)
    bench.store.close()


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    bench = Bench(1, 1)
    with pytest.raises(AdapterError, match=r"adapter_config.json cannot be read"):
        bench.store.add(tmp_path / "none")
    bench.store.close()


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
