"""What was submitted to an engine process and what it has answered, so that the next process continues from there.

```
 requests ──> OpenRequests ──> process            events ──> OpenRequests ──> listeners and watchers
                  │   the process is lost: its requests, with the tokens that were sent as known tokens
                  └──> the next process
```
Listeners and watchers see one engine: a request arrives once, is preempted by the loss, and ends once. Nothing is
reported twice. `core.recovery` has the limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Emitted,
    EngineLost,
    Event,
    Finished,
    LostPart,
    Preempted,
    PreemptReason,
    PromptScored,
    Stepped,
)
from headrace.core.ports import LOST_PREFIX
from headrace.core.recovery import MOST_LOSSES_OF_REQUEST
from headrace.core.request import FinishReason, Request


class OpenRequest:
    """A request that has not ended, and what was reported of it."""

    __slots__ = (
        "arrived",
        "cached_tokens",
        "cancelled",
        "losses",
        "request",
        "running",
        "scored",
        "tokens",
        "unheard",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []  # emitted
        self.arrived = False
        self.unheard = False  # its process has it, and has reported nothing of it
        self.running = False
        self.cached_tokens: int | None = None  # of its prompt, at its first admission
        self.scored = 0  # prompt positions whose log-probabilities were reported
        self.losses = 0  # how often its engine was lost while it ran, or in its first step
        self.cancelled: FinishReason | None = None

    @property
    def rest(self) -> Request:
        """The request for another engine: the tokens that were emitted are known."""
        if not self.tokens:
            return self.request
        return replace(self.request, answered=(*self.request.answered, *self.tokens))

    def ended(self, reason: FinishReason, message: str = "") -> Finished:
        """Its end without an engine."""
        request = self.request
        output = len(request.answered) + len(self.tokens)
        return Finished(request.id, reason, len(request.tokens), output, self.cached_tokens or 0, message)


class OpenRequests:
    """The open requests of an engine process and of those after it."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._steps = 0  # steps that were reported
        self._first_step = 0  # of this process

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: Request, *, sent: bool) -> None:
        """A request is submitted, and ``sent`` to a process, unless one is being started."""
        self._open[request.id] = each = OpenRequest(request)
        each.unheard = sent

    def cancel(self, request_id: str, why: FinishReason) -> None:
        """A request is cancelled: `lose` or `end_cancelled` ends it if its engine does not. Ignores unknown ids."""
        if (each := self._open.get(request_id)) is not None:
            each.cancelled = why

    def send(self) -> list[Request]:
        """What another process gets, in the order of submission."""
        for each in self._open.values():
            each.unheard = True
        return [each.rest for each in self._open.values()]

    def take(self, events: Iterable[Event]) -> list[Event]:
        """The events of an engine as listeners and watchers get them."""
        taken: list[Event] = []
        for event in events:
            if type(event) is Emitted:
                if (each := self._open.get(event.request_id)) is not None:
                    each.tokens += event.tokens
                taken.append(event)
            elif (reported := self._reported(event)) is not None:
                taken.append(reported)
        return taken

    def _reported(self, event: Event) -> Event | None:
        """The event, if it is new to listeners and watchers, with what only the first engine knew."""
        if isinstance(event, Stepped):
            self._steps = self._first_step + event.step + 1
            return event._replace(step=self._steps - 1) if self._first_step else event
        if not isinstance(event, Arrived | Admitted | Preempted | PromptScored | Finished):
            return event
        each = self._open.get(event.request_id)
        if each is None:
            return None if isinstance(event, Finished) else event  # it has ended here
        if isinstance(event, Arrived):
            known, each.arrived, each.unheard = each.arrived, True, False
            return None if known else event
        if isinstance(event, Admitted):
            return _admitted(each, event)
        if isinstance(event, PromptScored):
            return _scored(each, event)
        if isinstance(event, Preempted):
            each.running = False
            return event
        del self._open[event.request_id]
        return event._replace(cached_tokens=each.cached_tokens or 0) if each.losses else event

    def lose(self, message: str, again: bool, failure: str) -> list[Event]:
        """The process was lost; those that it computed wait ``again``, or all requests fail with ``failure``.

        A request that has met too many losses fails in both cases.
        """
        events: list[Event] = []
        recomputed = failed = 0
        self._first_step = self._steps
        for each in tuple(self._open.values()):
            computed, each.unheard = each.running or each.unheard, False
            each.losses += computed
            if each.cancelled is not None:
                events.append(self._end(each, each.cancelled))
            elif not again or (computed and each.losses > MOST_LOSSES_OF_REQUEST):
                events.append(
                    self._end(each, FinishReason.FAILED, LOST_PREFIX + message if again else failure)
                )
                failed += 1
            elif each.running:
                each.running = False
                known = len(each.request.tokens) + len(each.request.answered) + len(each.tokens)
                events.append(Preempted(each.request.id, PreemptReason.LOST, known))
                recomputed += 1
        return [*events, EngineLost(LostPart.PROCESS, message, recomputed, failed)]

    def end_cancelled(self) -> list[Event]:
        """The ends of cancelled requests, while there is no engine to end them."""
        return [
            self._end(each, each.cancelled)
            for each in tuple(self._open.values())
            if each.cancelled is not None
        ]

    def fail(self, message: str) -> list[Event]:
        """The ends of all requests, when there will be no engine any more."""
        return [self._end(each, FinishReason.FAILED, message) for each in tuple(self._open.values())]

    def _end(self, each: OpenRequest, reason: FinishReason, message: str = "") -> Finished:
        del self._open[each.request.id]
        return each.ended(reason, message)


def _admitted(each: OpenRequest, event: Admitted) -> Admitted:
    each.running = True
    if each.cached_tokens is None:
        each.cached_tokens = min(event.cached_tokens, len(each.request.tokens))
    elif event.reason is AdmitReason.NEW:
        return event._replace(reason=AdmitReason.RESUMED)
    return event


def _scored(each: OpenRequest, event: PromptScored) -> PromptScored | None:
    new = event.logprobs[max(0, each.scored - event.start) :]
    if not new:
        return None
    each.scored = event.start + len(event.logprobs)
    return PromptScored(event.request_id, each.scored - len(new), new)
