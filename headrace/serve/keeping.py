"""What becomes of an answer after its caller has it: it is kept, and whoever learns from answers is told.

All that ends within a moment is kept together: the next call is not kept waiting for the writing, and an interpreter
that is at it takes a fraction of the time for each. Who asks for such an answer meanwhile has it kept at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.core.cache.ask import Ask
from headrace.core.cache.entry import Entry, lifetime
from headrace.core.ports import Keeper
from headrace.serve.exact import ExactCache
from headrace.serve.flight import Flight

logger = logging.getLogger(__name__)

KEEP_SECONDS = 0.02
"""How long an answer may wait to be kept, unless somebody asks for it before, or a store has to be waited for: there
writing begins at once, to be done when somebody asks."""

WRITE_SECONDS = 2.0
"""What the last answers get to be written when the server stops."""


class Keeping:
    """Puts whole answers into a cache.

    Args:
        exact: keeps them.
        ttl: seconds that an answer is kept unless its caller says otherwise.
        keepers: told of what has been kept.
        landed: told of each flight when its answer can be found in the cache, or never will be.
    """

    def __init__(
        self,
        exact: ExactCache,
        ttl: float,
        keepers: Sequence[Keeper],
        landed: Callable[[Flight], None],
    ) -> None:
        self._exact = exact
        self._ttl = ttl
        self._keepers = tuple(keepers)
        self._landed = landed
        self._waiting: dict[bytes, list[Flight]] = {}  # by their asks' beginnings
        self._writing: set[asyncio.Task[None]] = set()

    def add(self, flight: Flight) -> None:
        """Keep the answer of a flight that is over, in a moment."""
        if not self._waiting:
            delay = KEEP_SECONDS if self._exact.at_hand else 0.0
            asyncio.get_running_loop().call_later(delay, self._write)
        self._waiting.setdefault(flight.ask.beginning, []).append(flight)

    async def catch_up(self, ask: Ask) -> None:
        """Have stores at hand know by now what ``ask`` may be answered from, or may begin with."""
        if ask.beginning in self._waiting:
            self._write()
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
        self._write()
        if self._writing:
            await asyncio.wait(self._writing, timeout=WRITE_SECONDS)

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for flights in waiting.values():
            for flight in flights:
                task = asyncio.get_running_loop().create_task(self._keep(flight))
                self._writing.add(task)
                task.add_done_callback(self._writing.discard)

    async def _keep(self, flight: Flight) -> None:
        try:
            entry = self._entry(flight)
            kept = await self._exact.keep(flight.ask, entry)
        finally:
            self._landed(flight)
        if kept:
            self.tell(lambda keeper: keeper.kept(flight.ask, entry))  # afterwards: they may look it up

    def _entry(self, flight: Flight) -> Entry:
        ask, finished = flight.ask, flight.end
        assert finished is not None
        now = self._exact.wall()
        ttl = lifetime(self._ttl if ask.control.ttl is None else ask.control.ttl, ask.key)
        return Entry(
            tokens=flight.tokens,
            reason=finished.reason,
            prompt_tokens=len(ask.request.tokens),
            seconds=flight.seconds,
            created=now,
            expires=now + ttl,
            stale_until=now + ttl + ask.control.stale_while_revalidate,
            logprobs=flight.logprobs,
            stop_token=finished.stop_token,
            pulses=flight.pulses,
            versions=flight.versions,
        )
