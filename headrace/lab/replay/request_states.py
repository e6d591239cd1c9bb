"""States of requests after each step: which wait and why, and which run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.events import Admitted, Arrived, Event, Finished, Preempted, Skipped


class Waiting(NamedTuple):
    """A request that has waited since ``since``, and the last reason for it."""

    request_id: str
    since: float
    reason: str


@dataclass(slots=True)
class RequestStates:
    """A fold over events; ``waiting`` is in the order in which requests began to wait."""

    waiting: dict[str, Waiting] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)

    def fold(self, event: Event, now: float) -> None:
        match event:
            case Arrived():
                if event.request_id not in self.running:
                    self.waiting.setdefault(event.request_id, Waiting(event.request_id, now, "arrived"))
            case Admitted():
                self.waiting.pop(event.request_id, None)
                self.running.add(event.request_id)
            case Skipped():
                if (kept := self.waiting.get(event.request_id)) is not None:
                    self.waiting[event.request_id] = kept._replace(reason=str(event.reason))
            case Preempted():
                self.running.discard(event.request_id)
                why = f"preempted: {event.reason}"
                self.waiting[event.request_id] = Waiting(event.request_id, now, why)
            case Finished():
                self.waiting.pop(event.request_id, None)
                self.running.discard(event.request_id)
