"""How far the tuner may take each setting: lower and upper bounds around where it began, and the size of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace.tuning.steering.settings import Setting, Value


class Range(NamedTuple):
    """Bounds and step of one setting; a step multiplies or divides by ``factor``. ``whole`` values are rounded.

    A value of 0, which means no bound, counts as ``high``.
    """

    low: float
    high: float
    factor: float
    whole: bool

    def step(self, value: Value, up: bool) -> Value | None:
        """The next value up or down; None at a bound."""
        value = value or self.high
        wanted = value * self.factor if up else value / self.factor
        wanted = min(self.high, max(self.low, wanted))
        if self.whole:
            wanted = int(wanted) if wanted < value else int(-(-wanted // 1))
        return None if wanted == value else wanted


FACTORS: Mapping[str, float] = {
    "mixed_prefill_ratio": 1.6,
    "max_num_batched_tokens": 2.0,
    "max_running": 1.5,
    "static_batch_timeout": 2.0,
}
"""The settings that the tuner changes, with the factor of a step, in the order in which they are tried."""

REACH = 64.0  # see docs/decisions/tuning.md#range-of-a-setting
"""How many times larger or smaller than at the start a setting may become."""


def ranges(settings: Mapping[str, Setting], start: Mapping[str, Value]) -> dict[str, Range]:
    """The range of each setting that the tuner changes.

    ``max_running`` at 0 begins at all slots; another setting at 0, which means no bound, is left alone.
    """
    found = {}
    for name, factor in FACTORS.items():
        if name not in settings:
            continue
        setting, value = settings[name], start[name]
        if name == "max_running":
            value = value or setting.high
        if value > 0:
            low, high = max(setting.low, value / REACH, 1e-3), min(setting.high, value * REACH)
            found[name] = Range(
                float(max(1, round(low))) if setting.whole else low, high, factor, setting.whole
            )
    return found
