"""Sleep of the served model: what happens to its requests, in which order, and what is reported.

```
 awake ── sleep: reject new requests ── wait, abort or keep open ones ── free memory ──> asleep
 asleep ── wake_up: restore memory ──> awake: kept requests continue, new ones are accepted
```
Responses from the caches are served all the time. The engine frees the memory itself, between two steps; `Memory` asks
it to. There is one change at a time. An engine process that is started in place of a lost one is awake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol, get_args

from headrace.core.events import EngineLost, Event, LostPart
from headrace.core.sleep import SleepChanged, SleepState
from headrace.service.service import Service

logger = logging.getLogger(__name__)


class Part(StrEnum):
    """A part of the memory of a model, by vLLM's tags."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"


LEVELS = {1: frozenset({Part.KV_CACHE}), 2: frozenset(Part)}
"""What sleeps at each level. At level 1 the weights stay in host memory, which on a CPU is where they are."""

Mode = Literal["wait", "abort", "keep"]
MODES: tuple[Mode, ...] = get_args(Mode)


class MemoryReport(NamedTuple):
    """The memory of the engine's process before and after a change; 0 where the system does not report it.

    ``sleeping`` are the parts that sleep now. ``problem`` says why a part could not be restored; empty: it was.
    """

    sleeping: tuple[Part, ...]
    before_bytes: int
    after_bytes: int
    problem: str = ""


class Memory(Protocol):
    """Frees and restores the memory of an engine; called between two steps."""

    def sleep(self, parts: tuple[Part, ...]) -> MemoryReport: ...

    def wake_up(self, parts: tuple[Part, ...]) -> MemoryReport: ...


class CannotSleep(Exception):
    """A part of the memory cannot be freed here; the message says why."""


class WokenUp(Exception):
    """The model was woken up while `Sleep.sleep` waited for running requests."""


class CannotWakeUp(Exception):
    """A part could not be restored; the model sleeps on. The message says why."""


class Change(NamedTuple):
    """The result of a call: what sleeps now, open requests that were ``aborted`` or are ``kept``, and its time."""

    memory: MemoryReport
    aborted: int
    kept: int
    seconds: float


class Sleep:
    """Puts the engine of ``service`` to sleep. ``refused`` says why a part cannot sleep here."""

    fold_tokens = None

    def __init__(self, service: Service, memory: Memory, refused: dict[Part, str]) -> None:
        self._service = service
        self._memory = memory
        self._refused = refused
        self._lock = asyncio.Lock()
        self._woken = asyncio.Event()
        self.sleeping: tuple[Part, ...] = ()
        service.watch(self)

    def fold(self, event: Event, now: float) -> None:
        """Nothing sleeps any more after the engine's process was lost. A change that is under way goes on."""
        if type(event) is EngineLost and event.part is LostPart.PROCESS and self.sleeping:
            self.sleeping, self._service.woken = (), now
            if not self._lock.locked():
                self._service.sleeping = False
            self._service.note(SleepChanged(SleepState.AWAKE, 0.0))
            logger.warning("awake: the engine's process was lost, and the next one does not sleep")

    async def sleep(self, parts: Iterable[Part], mode: Mode) -> Change:
        """Free ``parts``, after open requests have ended (``wait``), were aborted, or are kept for later.

        Raises:
            CannotSleep: a part cannot be freed here.
            WokenUp: `wake_up` was called while it waited.
        """
        parts = tuple(part for part in Part if part in frozenset(parts))
        for part in parts:
            if why := self._refused.get(part):
                raise CannotSleep(why)
        async with self._lock:
            service, began = self._service, self._service.now()
            service.sleeping = True
            self._woken.clear()
            try:
                aborted = await self._settle(mode)
                memory = await service.between_steps(lambda: self._memory.sleep(parts))
            except BaseException:
                service.sleeping = bool(self.sleeping)
                raise
            return self._changed(memory, aborted, began)

    async def wake_up(self, parts: Iterable[Part]) -> Change:
        """Restore ``parts``; the engine continues when none sleeps any more.

        Raises:
            CannotWakeUp: a part could not be restored.
        """
        parts = tuple(part for part in Part if part in frozenset(parts))
        self._woken.set()
        async with self._lock:
            began = self._service.now()
            try:
                memory = await self._service.between_steps(lambda: self._memory.wake_up(parts))
            except BaseException:
                self._service.sleeping = bool(self.sleeping)
                raise
            change = self._changed(memory, 0, began)
        if memory.problem:
            raise CannotWakeUp(memory.problem)
        return change

    async def _settle(self, mode: Mode) -> int:
        """Bring open requests to the state that ``mode`` asks for; returns how many were aborted."""
        service, aborted = self._service, 0
        if mode == "keep":
            return 0
        if mode == "abort":
            aborted = service.open_requests()
            service.close_all()
        empty = asyncio.ensure_future(service.empty.wait())
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait({empty, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            empty.cancel()
            woken.cancel()
        if not service.empty.is_set():
            raise WokenUp
        return aborted

    def _changed(self, memory: MemoryReport, aborted: int, began: float) -> Change:
        if self._service.thread.progress().restarting:  # the process that answered was lost since
            memory = memory._replace(sleeping=())
        service, was, self.sleeping = self._service, self.sleeping, memory.sleeping
        service.sleeping = bool(memory.sleeping)
        now = service.now()
        if was and not memory.sleeping:
            service.woken = now
        change = Change(memory, aborted, service.open_requests(), now - began)
        if memory.sleeping != was:
            service.note(SleepChanged(state_of(memory.sleeping), now - began))
            words = "asleep: " + ", ".join(memory.sleeping) if memory.sleeping else "awake"
            fields = {
                "seconds": round(change.seconds, 3),
                "resident_before": memory.before_bytes,
                "resident": memory.after_bytes,
                "aborted": aborted,
                "open_requests": change.kept,
            }
            logger.info("%s", words, extra={"fields": fields})
        return change


def state_of(sleeping: Iterable[Part]) -> SleepState:
    """The state by vLLM's names."""
    parts = frozenset(sleeping)
    if Part.WEIGHTS in parts:
        return SleepState.DISCARD_ALL
    return SleepState.WEIGHTS_OFFLOADED if parts else SleepState.AWAKE
