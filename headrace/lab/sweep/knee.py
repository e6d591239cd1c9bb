"""The knee of a curve: the smallest value at which throughput has reached its plateau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

REACHED = 0.95
"""Minimum share of the best throughput for a value to belong to the plateau."""

STILL_GROWING = 1.05
"""If the last step raises throughput by more than this factor, there is no plateau."""


class Knee(NamedTuple):
    """Where the plateau of a curve begins.

    ``value`` is the smallest value with at least `REACHED` of the best throughput; ``last`` is the largest value.
    ``throughput`` is that at the knee; ``gain`` and ``slower`` are the ratios of throughput and latency at ``last`` to
    those at the knee. ``growth`` is the ratio of the last two throughputs (NaN with one value).
    """

    value: int
    last: int
    throughput: float
    gain: float
    slower: float
    growth: float

    @property
    def found(self) -> bool:
        """Whether the curve has a plateau: more than one value, and the last step added little."""
        return not math.isnan(self.growth) and (self.value < self.last or self.growth <= STILL_GROWING)

    def sentence(self, what: str, latency: str) -> str:
        """The knee as a sentence; ``what`` names the curve, ``latency`` the latency."""
        if math.isnan(self.growth):
            return f"{what}: only {self.value} was measured."
        if not self.found:
            return (
                f"{what}: no plateau up to {self.last}; its last step still adds {_percent(self.growth)}. "
                "Try larger values."
            )
        at = f"{what}: the knee is {self.value}, with {self.throughput:,.0f} output tokens/s."
        if self.value == self.last:
            return f"{at} Larger values were not tried."
        change = "adds" if self.gain >= 1 else "loses"
        then = f"{self.last} {change} {_percent(self.gain)} of throughput"
        return f"{at} {then} and has {self.slower:.1f} times the {latency}."


def _percent(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.0f} %"


def knee(values: Sequence[int], throughputs: Sequence[float], latencies: Sequence[float]) -> Knee:
    """The knee of a curve with ascending ``values``; throughputs in output tokens per second, latencies in seconds.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a knee needs at least one value")
    best = max(throughputs)
    place = next(i for i, each in enumerate(throughputs) if each >= REACHED * best)
    growth = throughputs[-1] / throughputs[-2] if len(values) > 1 and throughputs[-2] > 0 else math.nan
    return Knee(
        values[place],
        values[-1],
        throughputs[place],
        _ratio(throughputs[-1], throughputs[place]),
        _ratio(latencies[-1], latencies[place]),
        growth,
    )


def _ratio(value: float, base: float) -> float:
    return value / base if base > 0 else math.nan
