"""A block pool that measures its lookups in the prefix cache.

The core knows no clock, so the time is taken around `BlockPool.match`. A lookup that a step repeats for a request that
still waits counts again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.observe.cache_metrics import LOOKUP_SECONDS
from headrace.observe.metrics_page import Histogram


class TimedPool(BlockPool):
    """A `BlockPool` with the seconds of its lookups in ``lookups``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lookups = Histogram(LOOKUP_SECONDS)

    def match(
        self, root: bytes, keys: Sequence[bytes], tokens: Sequence[int], limit: int, *, may_wait: bool = True
    ) -> PrefixHit:
        began = time.perf_counter()
        hit = super().match(root, keys, tokens, limit, may_wait=may_wait)
        self.lookups.observe(time.perf_counter() - began)
        return hit
