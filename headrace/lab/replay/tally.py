"""Figures of a replayed run, for comparing runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.core.events import AdmitReason, Admitted, Emitted, Event, Finished, Preempted, Stepped
from headrace.core.request import FinishReason, Request


@dataclass(slots=True)
class Tally:
    """A fold over one run; times are in seconds from a request's arrival.

    ``waits`` end at the first admission, ``ttft`` at the first token, ``e2e`` at the end of a completed output.
    """

    waits: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    preemptions: int = 0
    lost_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    _since: dict[str, float] = field(default_factory=dict)
    _without_token: set[str] = field(default_factory=set)

    def expect(self, request: Request) -> None:
        """Registers a request. The server's warm-up request, whose arrival is minus infinity, does not count."""
        if request.arrived != -math.inf:
            self._since[request.id] = request.arrived
            self._without_token.add(request.id)

    def fold(self, event: Event, now: float) -> None:
        match event:
            case Admitted(request_id, reason, cached) if request_id in self._since:
                self.cached_tokens += cached
                if reason is AdmitReason.NEW:
                    self.waits.append((now if event.at is None else event.at) - self._since[request_id])
            case Emitted(request_id) if request_id in self._without_token:
                self._without_token.discard(request_id)
                self.ttft.append(now - self._since[request_id])
            case Preempted():
                self.preemptions += 1
                self.lost_tokens += event.lost_tokens
            case Finished(request_id, reason) if request_id in self._since:
                since = self._since.pop(request_id)
                self._without_token.discard(request_id)
                if reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self.e2e.append(now - since)
            case Stepped():
                self.steps += 1
