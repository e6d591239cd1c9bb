"""Request states after each step: the waiting requests with their reasons, and the running ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.events import Admitted, Arrived, Event, Finished, Preempted, Skipped
from headrace.observe.steps.record import Waiting


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
