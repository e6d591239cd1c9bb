"""Background requests: computes responses only to fill the caches, in idle time.

It has the interface of `lookup.CacheLookup`, so that a request computed ahead is parsed, rendered and keyed
by the same code as the later request that is served from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace.core.events import Finished
from headrace.core.request import FinishReason
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.lookup_request import LookupRequest
from headrace.response_cache.single_flight import SingleFlight
from headrace.service.answer import Answer

ID_PREFIX = "warm-"
"""Prefix of the ids of background requests."""


class NotCacheable(Exception):
    """The response could not be cached; the message says why."""


class _PendingAnswer(Answer):
    """An answer without tokens, which ends once all ``flights`` (computations of what is not cached yet) have ended."""

    def __init__(self, questions: Sequence[LookupRequest]) -> None:
        super().__init__([question.request for question in questions], interval=0)
        self.flights: list[SingleFlight] = []


class BackgroundRequests:
    """Computes requests into the caches of ``recall``."""

    def __init__(self, recall: CacheLookup) -> None:
        self._recall = recall
        self._asked = 0

    def now(self) -> float:
        """The time of arrivals and deadlines."""
        return self._recall.now()

    async def open(self, questions: Sequence[LookupRequest], interval: int = 1) -> Answer:
        """Begin to compute what is not cached yet.

        Raises:
            NotCacheable: a response could not be cached.
            Refused: as `CacheLookup.open`.
        """
        renamed = [self._rename(question) for question in questions]
        for question in renamed:
            allowed = self._recall.ask(question).allowed
            if not allowed.exact or allowed.pool:
                raise NotCacheable(allowed.why or "a pool of samples is filled by its own requests")
        pending = _PendingAnswer(renamed)
        try:
            for index, question in enumerate(renamed):
                await self._begin(pending, index, question)
        except BaseException:
            self.close(pending)
            raise
        pending.note = "computed" if pending.flights else "kept"
        return pending

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel unfinished computations; their tokens so far are stored and resumed later."""
        if isinstance(answer, _PendingAnswer):
            for flight in answer.flights:
                self._recall.give_up(flight, why)

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """A flight finds its stop strings itself."""

    async def _begin(self, pending: _PendingAnswer, index: int, question: LookupRequest) -> None:
        flight = None if await self._recall.keeps(question) else self._recall.renew(question)
        if flight is None:  # cached, or being computed for another request
            pending.tell(index, Finished(question.request.id, FinishReason.STOP, 0, 0, 0))
        else:
            pending.flights.append(flight)
            flight.when_over(partial(self._end, pending, index, flight))

    def _end(self, pending: _PendingAnswer, index: int, flight: SingleFlight) -> None:
        assert flight.end is not None
        pending.tell(index, flight.end)

    def _rename(self, question: LookupRequest) -> LookupRequest:
        self._asked += 1
        return question._replace(request=replace(question.request, id=f"{ID_PREFIX}{self._asked}"))
