"""Calls that nobody made: what they ask is computed for the caches alone, when nothing else is to be done.

It stands where `serve.cache.lookup.CacheLookup` stands for real calls, so a call computed ahead is parsed, rendered
and keyed by the very same code as the call that will one day be answered from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace.core.events import Finished
from headrace.core.request import FinishReason
from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.cache.lookup_request import LookupRequest
from headrace.serve.cache.single_flight import SingleFlight
from headrace.serve.service import Answer

ID_PREFIX = "warm-"
"""Begins the ids of requests that nobody waits for."""


class NotCacheable(Exception):
    """No cache would keep the answer; the message says why."""


class _Promise(Answer):
    """An answer that only ends; ``flights`` compute what of it was not kept yet."""

    def __init__(self, questions: Sequence[LookupRequest]) -> None:
        super().__init__([question.request for question in questions], interval=0)
        self.flights: list[SingleFlight] = []


class BackgroundRequests:
    """Has questions answered into the caches of ``recall``."""

    def __init__(self, recall: CacheLookup) -> None:
        self._recall = recall
        self._asked = 0

    def now(self) -> float:
        """The time of arrivals and deadlines."""
        return self._recall.now()

    async def open(self, questions: Sequence[LookupRequest], interval: int = 1) -> Answer:
        """Begin to compute what is not kept yet.

        Raises:
            NotCacheable: an answer could not be kept.
            Refused: as `CacheLookup.open`.
        """
        renamed = [self._rename(question) for question in questions]
        for question in renamed:
            allowed = self._recall.ask(question).allowed
            if not allowed.exact or allowed.pool:
                raise NotCacheable(allowed.why or "a pool of samples is filled by those who ask for it")
        promise = _Promise(renamed)
        try:
            for index, question in enumerate(renamed):
                await self._begin(promise, index, question)
        except BaseException:
            self.close(promise)
            raise
        promise.note = "computed" if promise.flights else "kept"
        return promise

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Leave what is not finished, to be taken up another time."""
        if isinstance(answer, _Promise):
            for flight in answer.flights:
                self._recall.give_up(flight, why)

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """A flight finds its stop strings itself."""

    async def _begin(self, promise: _Promise, index: int, question: LookupRequest) -> None:
        flight = None if await self._recall.keeps(question) else self._recall.renew(question)
        if flight is None:  # kept, or being computed for somebody
            promise.tell(index, Finished(question.request.id, FinishReason.STOP, 0, 0, 0))
        else:
            promise.flights.append(flight)
            flight.when_over(partial(self._end, promise, index, flight))

    def _end(self, promise: _Promise, index: int, flight: SingleFlight) -> None:
        assert flight.end is not None
        promise.tell(index, flight.end)

    def _rename(self, question: LookupRequest) -> LookupRequest:
        self._asked += 1
        return question._replace(request=replace(question.request, id=f"{ID_PREFIX}{self._asked}"))
