"""What becomes of an answer after its caller has it: it is kept, and whoever learns from answers is told.

Writing an answer and learning from it take a millisecond or two of the event loop. So they wait for a moment in which
nobody is being answered, though not for long, and one answer is kept after the other: whoever comes meanwhile is heard
before the next. Who asks for such an answer has it kept at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.core.cache.partial.unfinished_answers import UnfinishedAnswer
from headrace.core.cache.response.entry import Entry, lifetime
from headrace.core.cache.response.query import CacheQuery
from headrace.core.ports import Keeper
from headrace.serve.cache.exact import ExactCache
from headrace.serve.cache.single_flight import SingleFlight

logger = logging.getLogger(__name__)

KEEP_SECONDS = 0.02
"""How long an answer waits at least, for the next call often comes at once; unless somebody asks for it before, or a
store has to be waited for: there writing begins at once, to be done when somebody asks."""

PATIENCE_SECONDS = 0.2
"""How long it waits at most for a moment in which nobody is being answered."""

LOOK_SECONDS = 0.005
"""Between two looks at whether that moment has come."""

WRITE_SECONDS = 2.0
"""What the last answers get to be written when the server stops."""


class CacheWriter:
    """Puts whole answers into a cache.

    Args:
        exact: keeps them.
        ttl: seconds that an answer is kept unless its caller says otherwise.
        keepers: told of what has been kept.
        landed: told of each flight when its answer can be found in the cache, under which key, or never will be.
        busy: whether somebody is being answered.
    """

    def __init__(
        self,
        exact: ExactCache,
        ttl: float,
        keepers: Sequence[Keeper],
        landed: Callable[[SingleFlight, bytes | None], None],
        busy: Callable[[], bool],
    ) -> None:
        self._exact = exact
        self._ttl = ttl
        self._keepers = tuple(keepers)
        self._landed = landed
        self._busy = busy
        self._waiting: dict[SingleFlight, float] = {}  # and when each was over; the oldest first
        self._worker: asyncio.Task[None] | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def add(self, flight: SingleFlight) -> None:
        """Keep the answer of a flight that is over, in a moment."""
        if not self._exact.at_hand:
            self._begin(flight)
            return
        loop = asyncio.get_running_loop()
        self._waiting[flight] = loop.time()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())

    def break_off(self, flight: SingleFlight) -> None:
        """Tell the keepers of a flight that is over and whose answer is not whole."""
        left = UnfinishedAnswer(flight.tokens, flight.seconds, flight.versions, *self._life(flight))
        self.tell(lambda keeper: keeper.broken_off(flight.ask, left))

    async def catch_up(self, ask: CacheQuery) -> None:
        """Have stores at hand know by now what ``ask`` may be answered from, or may begin with."""
        wanted = [flight for flight in self._waiting if flight.ask.beginning == ask.beginning]
        if wanted:
            for flight in wanted:
                self._begin(flight)
            await asyncio.sleep(0)

    def tell(self, tell: Callable[[Keeper], None]) -> None:
        """Call all keepers. They learn after the fact: no caller shall pay for one that fails."""
        for keeper in self._keepers:
            try:
                tell(keeper)
            except Exception:
                logger.exception("%s failed to take note of an answer", type(keeper).__name__)

    async def finish(self) -> None:
        """Write now what is to be written, and wait for it."""
        if self._worker is not None:
            self._worker.cancel()
            self._worker = None
        for flight in tuple(self._waiting):
            self._begin(flight)
        if self._writing:
            await asyncio.wait(self._writing, timeout=WRITE_SECONDS)

    async def _work(self) -> None:
        await asyncio.sleep(KEEP_SECONDS)
        clock = asyncio.get_running_loop().time
        while self._waiting:
            oldest, since = next(iter(self._waiting.items()))
            if self._busy() and clock() < since + PATIENCE_SECONDS:
                await asyncio.sleep(LOOK_SECONDS)
            else:
                await asyncio.wait([self._begin(oldest)])

    def _begin(self, flight: SingleFlight) -> asyncio.Task[None]:
        self._waiting.pop(flight, None)
        task = asyncio.get_running_loop().create_task(self._keep(flight))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def _keep(self, flight: SingleFlight) -> None:
        key = None
        try:
            entry = self._entry(flight)
            key = await self._exact.keep(flight.ask, entry)
        finally:
            self._landed(flight, key)
        if key is not None:
            self.tell(lambda keeper: keeper.kept(flight.ask, entry))  # afterwards: they may look it up

    def _entry(self, flight: SingleFlight) -> Entry:
        ask, finished = flight.ask, flight.end
        assert finished is not None
        created, expires = self._life(flight)
        return Entry(
            tokens=flight.tokens,
            reason=finished.reason,
            prompt_tokens=len(ask.request.tokens),
            seconds=flight.seconds,
            created=created,
            expires=expires,
            stale_until=expires + ask.control.stale_while_revalidate,
            logprobs=flight.logprobs,
            stop_token=finished.stop_token,
            pulses=flight.pulses,
            versions=flight.versions,
        )

    def _life(self, flight: SingleFlight) -> tuple[float, float]:
        """When an answer was made and when it ends. It is as old as its oldest part, and ends no later than that."""
        ask, now = flight.ask, self._exact.wall()
        expires = now + lifetime(self._ttl if ask.control.ttl is None else ask.control.ttl, ask.key)
        if flight.resumed is None:
            return now, expires
        return flight.resumed.created, min(flight.resumed.expires, expires)
