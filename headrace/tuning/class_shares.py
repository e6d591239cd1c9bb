"""Moves weights and floors of service classes within bounds while a class misses its latency targets.

```
 class priority, weight 8 up to 32, floor 10 % up to 30 %
   targets missed   weight 8 → 16 → 32, then floor 10 % → 15 % → … → 30 %
   targets met      back by the same ways, down to the weight and the floor of the file
```
A class is judged by its requests that ended since its last judgement, at least `LEAST_REQUESTS`. Only the most
important class that misses is raised, because weights are relative: raising two raises none.
`Shares` decides, without a clock; `LiveShares` asks it beside a service, `SimulatedShares` in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.request import NO_SLO, Request
from headrace.core.tenancy.tenants import ClassShare, ServiceClass
from headrace.observe.goodput import Goodput
from headrace.observe.metrics_page import MetricsPage
from headrace.service.background import end
from headrace.service.service import Service

logger = logging.getLogger("headrace.class_shares")

LOOK_SECONDS = 5.0
"""Time between two judgements."""

LEAST_REQUESTS = 20
"""Ended requests with targets that a judgement needs."""

RAISE_BELOW = 0.95
"""Goodput below which a class is raised."""

LOWER_FROM = 0.99
"""Goodput from which a judgement speaks for lowering."""

CALM = 3
"""Judgements in a row that must speak for lowering: a raise is fast, a return is slow."""

WEIGHT_FACTOR = 2.0
FLOOR_STEP = 0.05


class Move(NamedTuple):
    """The new share of a class, and why it changes."""

    name: str
    share: ClassShare
    why: str


class Shares:
    """The present shares of ``classes``; those with a bound (`ServiceClass.most`) move."""

    def __init__(self, classes: Iterable[ServiceClass]) -> None:
        self._classes = {
            each.name: each for each in sorted(classes, key=lambda each: each.level) if each.most
        }
        self.present = {name: ClassShare(each.weight, each.floor) for name, each in self._classes.items()}
        self._judged: dict[str, tuple[int, int]] = {}
        self._calm = dict.fromkeys(self._classes, 0)
        self._full: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether a class may move."""
        return bool(self._classes)

    def decide(self, counts: Mapping[str, tuple[int, int]]) -> Iterable[Move]:
        """The moves that are due. ``counts`` are the requests of each class that met and missed their targets."""
        raised = False
        for name in self._classes:
            goodput = self._goodput(name, counts.get(name, (0, 0)))
            if goodput is None:
                continue
            if goodput < RAISE_BELOW:
                self._calm[name] = 0
                if not raised:
                    raised = True
                    yield from self._raise(name, goodput)
            elif goodput >= LOWER_FROM:
                self._calm[name] += 1
                if self._calm[name] >= CALM:
                    yield from self._lower(name, goodput)
            else:
                self._calm[name] = 0

    def _goodput(self, name: str, counts: tuple[int, int]) -> float | None:
        """Share of the requests since the last judgement that met all targets; None: too few have ended."""
        before = self._judged.get(name, (0, 0))
        met, missed = counts[0] - before[0], counts[1] - before[1]
        if met + missed < LEAST_REQUESTS:
            return None
        self._judged[name] = counts
        return met / (met + missed)

    def _raise(self, name: str, goodput: float) -> Iterable[Move]:
        most, now = self._classes[name].most, self.present[name]
        assert most is not None
        if now.weight < most.weight:
            share = now._replace(weight=min(most.weight, now.weight * WEIGHT_FACTOR))
        elif now.floor < most.floor:
            share = now._replace(floor=min(most.floor, round(now.floor + FLOOR_STEP, 6)))
        else:
            if name not in self._full:
                self._full.add(name)
                yield Move(name, now, f"{goodput:.0%} of its requests met their targets at the highest share")
            return
        self.present[name] = share
        yield Move(name, share, f"{goodput:.0%} of its requests met their targets")

    def _lower(self, name: str, goodput: float) -> Iterable[Move]:
        given, now = self._classes[name], self.present[name]
        if now.floor > given.floor:
            share = now._replace(floor=max(given.floor, round(now.floor - FLOOR_STEP, 6)))
        elif now.weight > given.weight:
            share = now._replace(weight=max(given.weight, now.weight / WEIGHT_FACTOR))
        else:
            return
        self._full.discard(name)
        self._calm[name], self.present[name] = 0, share
        yield Move(name, share, f"{goodput:.0%} of its requests met their targets, {CALM} times in a row")


class SimulatedShares:
    """A `Steering` of one simulated engine: requests get the targets of their class, and its classes move."""

    def __init__(self, classes: Iterable[ServiceClass]) -> None:
        self._terms = {each.name: each for each in classes}
        self._shares = Shares(self._terms.values())
        self._goodput = Goodput(MetricsPage())
        self._look_at = 0.0

    def assigned(self, request: Request) -> Request:
        """``request`` with the targets of its class, if it has none."""
        return (
            request if request.slo != NO_SLO else replace(request, slo=self._terms[request.service_class].slo)
        )

    def saw(self, events: Iterable[Event], now: float) -> None:
        """Count the events of a step."""
        for event in events:
            self._goodput.fold(event, now)

    def steer(self, engine: Engine, now: float) -> None:
        """Judge the classes if it is time; call it between two steps."""
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            if list(self._shares.decide(counts_of(self._goodput))):
                engine.set_class_shares(self._shares.present)


def counts_of(goodput: Goodput) -> dict[str, tuple[int, int]]:
    """The requests of each class that met and missed all their targets."""
    return {each.name: (each.met, each.missed) for each in goodput.classes()}


class LiveShares:
    """The background task. ``counts`` returns what `Shares.decide` takes; ``change`` sets those of all classes that
    move, on the engine thread.

    While ``frozen`` returns true, nothing moves. ``changed`` is called with each share, first with those at the start.
    """

    def __init__(
        self,
        shares: Shares,
        service: Service,
        counts: Callable[[], Mapping[str, tuple[int, int]]],
        change: Callable[[Mapping[str, ClassShare]], None],
        frozen: Callable[[], bool],
        changed: Callable[[str, ClassShare], None],
    ) -> None:
        self._shares = shares
        self._service = service
        self._counts = counts
        self._change = change
        self._frozen = frozen
        self._changed = changed
        self._task: asyncio.Task[None] | None = None
        for name, share in shares.present.items():
            changed(name, share)

    def start(self) -> None:
        """Begin; called on the server's loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; shares stay as they are, because the server ends too."""
        await end(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self._frozen():
                await self.look()

    async def look(self) -> None:
        """Judge the classes once, and change what is due."""
        moves = list(self._shares.decide(self._counts()))
        if not moves:
            return
        shares = dict(self._shares.present)
        try:
            await self._service.between_steps(lambda: self._change(shares))
        except Exception:  # one change that cannot be made must not end the task
            logger.exception("shares of classes cannot be changed")
            return
        for name, share, why in moves:
            self._changed(name, share)
            logger.info(
                "class %s has weight %g, floor %.0f %%: %s", name, share.weight, 100.0 * share.floor, why
            )
