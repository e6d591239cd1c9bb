"""How much KV memory was held without a token in it, averaged over time.

The figure that paging exists for (Kwon et al., SOSP 2023, section 2): contiguous allocation wastes most of
what it reserves, pages at most the tail of each sequence's last block. Knows only `Stepped` and `now`.
"""

from __future__ import annotations

from headrace.core.events import Event, Stepped


class KvWaste:
    """A `core.ports.Watcher` that weighs each step's slots by the time until the next step.

    A shared block counts once, whatever the number of sequences that hold it. Idle time counts nothing: no
    slot is held then.
    """

    def __init__(self) -> None:
        self._last: Stepped | None = None
        self._since = 0.0
        self._allocated = 0.0
        self._filled = 0.0
        self.peak_blocks = 0

    def fold(self, event: Event, now: float) -> None:
        if type(event) is not Stepped:
            return
        if self._last is not None:
            spent = now - self._since
            self._allocated += self._last.slots_allocated * spent
            self._filled += self._last.slots_filled * spent
        self._last, self._since = event, now
        self.peak_blocks = max(self.peak_blocks, event.blocks_held)

    @property
    def share(self) -> float:
        """Allocated but unused slots as a share of allocated slots, 0 to 1 (0 before two steps)."""
        return 1.0 - self._filled / self._allocated if self._allocated else 0.0
