"""Snapshots that say which topic they are of, and how often they were made."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Topics:
    """As `headrace.observe.dashboard`, without figures."""

    def __init__(self) -> None:
        self.measured = 0
        self.made: Counter[tuple[str, str | None]] = Counter()

    def measure(self, now: float) -> None:
        self.measured += 1

    def snapshot(self, part: str, tenant: str | None, now: float) -> dict[str, Any]:
        self.made[part, tenant] += 1
        return {"part": part, "tenant": tenant, "round": self.measured}
