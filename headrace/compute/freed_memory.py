"""Returns memory that steps have freed to the system, when a process has more than its memory plan says.

The C library keeps freed buffers for the next step (`device.keep_freed_memory`). Those of one size serve few of
another, so free memory grows beyond what any step needs where steps have buffers of many sizes, as those of hybrid
models and of mixtures of experts have. See docs/decisions/memory.md#memory-that-steps-have-freed.
"""

from __future__ import annotations

from headrace.compute.device import resident_bytes, return_freed_memory

STEPS = 256
"""Steps between two looks at the memory of the process."""

GROWTH_BYTES = 32 << 20
"""Growth since memory was returned that is worth doing it again: the next steps fault in what they need."""


class FreedMemory:
    """Watches a process that should have ``planned`` bytes."""

    def __init__(self, planned: int) -> None:
        self._planned = planned
        self._steps = 0
        self._left = 0

    def step(self) -> None:
        """Count a step; now and then, return what is free if there is more memory than planned."""
        self._steps += 1
        if self._steps % STEPS or resident_bytes() <= max(self._planned, self._left + GROWTH_BYTES):
            return
        return_freed_memory()
        self._left = resident_bytes()
