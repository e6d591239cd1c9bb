"""Restore policies: whether blocks in a lower tier are fetched or computed again, whichever is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from headrace.core.plan import Tier
from headrace.core.prediction.step_times import StepTimes

NEW_WEIGHT = 0.1
"""Weight of the newest transfer in a tier's measured bandwidth."""


COPIES = {Tier.HOST: 2}
"""How many copies of a block delay steps if it is evicted and restored. Copies to the disk do not delay steps."""


class RestorePolicy(Protocol):
    """How many of the next blocks of a sequence to fetch; the blocks after them are computed.

    ``start`` is the position of the first one, ``tiers`` the tier of each, in order. `pays` decides whether copying a
    chain of ``blocks`` blocks to a tier is worth it: never, if it would not be fetched from there. `observe` reports
    that a block has come from a tier in ``seconds``.
    """

    def choose(self, start: int, tiers: Sequence[Tier]) -> int: ...

    def pays(self, tier: Tier, blocks: int) -> bool: ...

    def observe(self, tier: Tier, seconds: float) -> None: ...


class RestoreFailed(Exception):
    """The restore policy raised an exception or returned an invalid count."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class AlwaysRestore:
    """Fetches every block that is in a lower tier."""

    def choose(self, start: int, tiers: Sequence[Tier]) -> int:
        return len(tiers)

    def pays(self, tier: Tier, blocks: int) -> bool:
        return True

    def observe(self, tier: Tier, seconds: float) -> None:
        pass


class Link(NamedTuple):
    """Latency and bandwidth from a tier to the device: seconds until a transfer starts, then bytes per second."""

    seconds: float
    bytes_per_second: float


class RestoreIfFaster:
    """Fetches the number of blocks that saves most time compared with computing them.

    Computing a block costs more the later its position, while the cost of fetching is constant. So within one tier, all
    or no blocks are fetched, and only the boundaries between tiers are compared. A tier without a link is never used.
    """

    def __init__(
        self, times: StepTimes, block_size: int, block_bytes: int, links: Mapping[Tier, Link]
    ) -> None:
        self._times = times
        self._block_size = block_size
        self._block_bytes = block_bytes
        self.links = dict(links)

    def choose(self, start: int, tiers: Sequence[Tier]) -> int:
        best, most_saved = 0, 0.0
        count, fetching = 0, 0.0
        for tier, run in groupby(tiers):
            link = self.links.get(tier)
            if link is None:
                break
            length = sum(1 for _ in run)
            count += length
            fetching += link.seconds + length * self._block_bytes / link.bytes_per_second
            saved = self._computing(start, count) - fetching
            if saved > most_saved:
                best, most_saved = count, saved
        return best

    def pays(self, tier: Tier, blocks: int) -> bool:
        link = self.links.get(tier)
        if link is None:
            return False
        copies = COPIES.get(tier, 1)
        carrying = link.seconds + copies * blocks * self._block_bytes / link.bytes_per_second
        return carrying < self._computing(0, blocks)

    def _computing(self, start: int, blocks: int) -> float:
        """Seconds that computing the next blocks from position ``start`` would add to steps that run anyway."""
        _, _, token, context = self._times.coefficients
        tokens = blocks * self._block_size
        return tokens * token + context * tokens * (start + tokens / 2)

    def observe(self, tier: Tier, seconds: float) -> None:
        """Observe that a block has come from ``tier`` in ``seconds``, without the latency until its copy began."""
        link = self.links[tier]
        bandwidth = self._block_bytes / max(seconds, 1e-9)
        self.links[tier] = link._replace(
            bytes_per_second=1 / ((1 - NEW_WEIGHT) / link.bytes_per_second + NEW_WEIGHT / bandwidth)
        )
