from __future__ import annotations

import pytest

from headrace.compute import device
from headrace.compute.device import GROWTH_BYTES, LOOK_STEPS, FreedMemory


class Process:
    """A process with ``live`` bytes in use and ``free`` ones that it has not returned."""

    def __init__(self, live: int, free: int) -> None:
        self.live, self.free, self.returned = live, free, 0

    def resident(self) -> int:
        return self.live + self.free

    def trim(self) -> None:
        self.returned, self.free = self.returned + 1, 0


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process(live=1 << 30, free=0)
    monkeypatch.setattr(device, "resident_bytes", made.resident)
    monkeypatch.setattr(device, "return_freed_memory", made.trim)
    return made


def after(watch: FreedMemory, process: Process, steps: int) -> int:
    for _ in range(steps):
        watch.step()
    return process.returned


def test_memory_is_returned_once_there_is_more_than_planned(process: Process) -> None:
    watch = FreedMemory(planned=(1 << 30) + (40 << 20))
    process.free = 40 << 20
    assert after(watch, process, 4 * LOOK_STEPS) == 0
    process.free += 1
    assert after(watch, process, LOOK_STEPS - 1) == 0
    assert after(watch, process, 1) == 1
    assert after(watch, process, 9 * LOOK_STEPS) == 1


def test_memory_in_use_is_not_looked_for_again_and_again(process: Process) -> None:
    watch = FreedMemory(planned=1)
    assert after(watch, process, LOOK_STEPS) == 1
    process.free = GROWTH_BYTES
    assert after(watch, process, 4 * LOOK_STEPS) == 1
    process.free += 1
    assert after(watch, process, LOOK_STEPS) == 2
