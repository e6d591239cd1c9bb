"""Who gives its blocks back when a running sequence cannot grow."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from headrace.core.sequence import Sequence


class VictimPolicy(Protocol):
    """Chooses one of the candidates; they come in the order of their place and none has been planned in this step."""

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence: ...


class LastRanked:
    """The one that would be served last: whoever ranks first always makes progress."""

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence:
        return candidates[-1]
