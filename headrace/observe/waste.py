"""Share of held KV memory that contains no token, averaged over time.

Paging exists to reduce it (Kwon et al., SOSP 2023, section 2): contiguous allocation wastes most of what it reserves,
paging at most the end of the last block of each sequence. It uses only `Stepped` events.
"""

from __future__ import annotations

from headrace.core.events import Event, Stepped


class KvWaste:
    """A `core.ports.Watcher` that weights the slots of each step by the time until the next step.

    A shared block counts once, however many sequences hold it. Idle time does not count, because no slot is held then.
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
        """Share of allocated slots that are unused, 0 to 1; 0 before the second step."""
        return 1.0 - self._filled / self._allocated if self._allocated else 0.0
