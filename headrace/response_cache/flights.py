"""The running computations: which one a request may join, and how one begins, resumes or is retried."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.events import Finished, Layer, LookedUp, Lookup, Spared
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup_request import LookupRequest
from headrace.response_cache.partial import Partial
from headrace.response_cache.rules.response.query import CacheQuery
from headrace.response_cache.single_flight import SingleFlight, rank
from headrace.service.service import Refused, Service

ATTEMPTS = 2
"""Maximum attempts to compute a response for requests that joined another one's computation."""


class Flights:
    """All `SingleFlight`s of a lookup.

    Args:
        service: computes them.
        exact: the exact cache, which decides whether a response that is being computed may still be served.
        partial: stores the beginnings of unfinished responses; None: all are computed from the beginning.
        ended: called with each flight and its end.
    """

    def __init__(
        self,
        service: Service,
        exact: ExactCache,
        partial: Partial | None,
        ended: Callable[[SingleFlight, Finished], None],
    ) -> None:
        self._service = service
        self._exact = exact
        self._partial = partial
        self._ended = ended
        self._by_key: dict[bytes, SingleFlight] = {}

    def under_way(self, ask: CacheQuery) -> SingleFlight | None:
        """The flight whose response may be stored for ``ask``."""
        flight = self._by_key.get(ask.key)
        return flight if flight is not None and self._exact.serves(ask, flight.versions) else None

    def followed(self, ask: CacheQuery) -> SingleFlight | None:
        """A flight that answers ``ask`` too, with at least the priority that its own flight would have."""
        flight = self.under_way(ask) if ask.allowed.coalesce else None
        if flight is None or (flight.resumed is not None and ask.control.max_age is not None):
            return None  # the resumed beginning may be too old
        return flight if flight.rank <= rank(ask.request) else None

    def make(
        self, ask: CacheQuery, question: LookupRequest, request: Request, *, anew: bool = False
    ) -> SingleFlight:
        """A flight that computes ``request``, resumed from an unfinished response unless ``anew``."""
        stops = None if question.stops is None else question.stops()
        versions = self._exact.snapshot(ask)
        flight = SingleFlight(ask, request, versions, stops, self._service.now, self._ended, self._again)
        if self._partial is not None and not anew:
            self._resume(self._partial, flight)
        return flight

    def register(self, flight: SingleFlight) -> None:
        """Let other requests join ``flight``. A slower flight of the same response that has no reader ends."""
        if not flight.ask.allowed.coalesce:
            return
        slower = self._by_key.get(flight.ask.key)
        self._by_key[flight.ask.key] = flight
        if slower is not None and slower.deserted:
            self._service.withdraw(slower, FinishReason.CANCELLED)

    def discard(self, flight: SingleFlight) -> None:
        """Let no further request join ``flight``."""
        if self._by_key.get(flight.ask.key) is flight:
            del self._by_key[flight.ask.key]

    def note_coalesced(self, flight: SingleFlight, request: Request) -> None:
        """Record that ``request`` was answered by the computation of another one."""
        prompt, output = len(request.tokens), len(flight.tokens)
        self._service.note(Spared(request.id, request.tenant, Layer.COALESCED, prompt, output, 0.0))

    def _resume(self, partial: Partial, flight: SingleFlight) -> None:
        """Begin where an earlier computation of the same response stopped."""
        ask, service = flight.ask, self._service
        began = service.now()
        beginning = partial.resumed(ask, flight.versions, self._exact.wall())
        outcome = Lookup.MISS if beginning is None else Lookup.HIT
        service.note(LookedUp(ask.request.id, Layer.PARTIAL, outcome, service.now() - began))
        if beginning is not None:
            flight.resume(beginning)
            tokens = len(beginning.tokens)
            service.note(Spared(ask.request.id, ask.request.tenant, Layer.PARTIAL, 0, tokens, 0.0))

    def _again(self, flight: SingleFlight) -> bool:
        """Restart ``flight`` for the requests that still read it; returns whether that was possible."""
        deadline = flight.deadline()
        late = deadline is not None and deadline <= self._service.now()
        if flight.deserted or late or flight.attempts >= ATTEMPTS:
            return False
        flight.restart()
        try:
            self._service.submit([flight])
        except (Refused, InvalidParameter):
            return False
        return True
