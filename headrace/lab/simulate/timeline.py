"""Quantities over an unlimited time in a bounded number of buckets.

When a value lies behind the last bucket, pairs of buckets are merged and the width doubles.
"""

from __future__ import annotations

from collections.abc import Iterable

BUCKETS = 512


class Timeline:
    """Sums of named quantities in buckets of equal ``width`` seconds, from time 0 on."""

    def __init__(self, names: Iterable[str] = (), width: float = 0.125) -> None:
        self.width = width
        self.columns: dict[str, list[float]] = {name: [0.0] * BUCKETS for name in names}

    def add(self, name: str, begin: float, end: float, amount: float) -> None:
        """Spreads ``amount`` evenly over the time from ``begin`` to ``end``, which may be equal."""
        while end >= BUCKETS * self.width:
            self._widen()
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = [0.0] * BUCKETS
        width = self.width
        first, last = int(begin / width), int(end / width)
        if first == last:
            column[first] += amount
            return
        density = amount / (end - begin)
        column[first] += density * ((first + 1) * width - begin)
        for place in range(first + 1, last):
            column[place] += density * width
        column[last] += density * (end - last * width)

    def coarse(self, name: str, width: float) -> list[float]:
        """A quantity in buckets of ``width``, which must be `width` times a power of two."""
        column, own = list(self.columns[name]), self.width
        while own < width:
            column = [column[i] + column[i + 1] for i in range(0, len(column), 2)]
            own *= 2.0
        return column + [0.0] * (BUCKETS - len(column))

    def _widen(self) -> None:
        self.width *= 2.0
        for name, column in self.columns.items():
            joined = [column[i] + column[i + 1] for i in range(0, BUCKETS, 2)]
            self.columns[name] = joined + [0.0] * (BUCKETS // 2)
