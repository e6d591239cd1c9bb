from __future__ import annotations

import pytest

from headrace.core.events import Stepped
from headrace.observe.waste import KvWaste


def stepped(allocated: int, filled: int, held: int = 0) -> Stepped:
    return Stepped(0, 0, 0, 0, 0, 0, held, 100, allocated, filled)


def test_waste_is_weighed_by_time() -> None:
    waste = KvWaste()
    assert waste.share == 0.0
    waste.fold(stepped(100, 50, held=7), 0.0)  # half empty for 1 s
    waste.fold(stepped(100, 90, held=5), 1.0)  # a tenth empty for 3 s
    waste.fold(stepped(0, 0), 4.0)  # idle: nothing held
    waste.fold(stepped(0, 0), 100.0)
    assert waste.share == pytest.approx(1 - (50 + 270) / 400)
    assert waste.peak_blocks == 7
