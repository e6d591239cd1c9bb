"""A quantile sketch with logarithmic bins and a relative error of at most `ACCURACY`.

After DDSketch (Masson, Rim, Lee, VLDB 2019): memory grows with the range of the values, not with their number.
"""

from __future__ import annotations

import math

ACCURACY = 0.005
_GAMMA = (1.0 + ACCURACY) / (1.0 - ACCURACY)
_LOG = math.log(_GAMMA)


class Sketch:
    """Counts of non-negative values; ``percentile`` has a relative error of at most `ACCURACY`."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._zeros = 0
        self._bins: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times."""
        self.count += times
        self.total += value * times
        if value > self.most:
            self.most = value
        if value <= 0.0:
            self._zeros += times
            return
        place = math.ceil(math.log(value) / _LOG)
        self._bins[place] = self._bins.get(place, 0) + times

    def percentile(self, percent: float) -> float:
        """The ``percent``-th percentile; NaN without values."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(percent / 100.0 * self.count))
        seen = self._zeros
        if seen >= rank:
            return 0.0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen >= rank:
                return min(self.most, 2.0 * _GAMMA**place / (1.0 + _GAMMA))
        return self.most

    @property
    def mean(self) -> float:
        """The mean of all values; NaN without values."""
        return self.total / self.count if self.count else math.nan
