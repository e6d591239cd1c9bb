"""Attaches a fold to the service only while it is read, so that it costs nothing otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.core.ports import Watcher
from headrace.service.service import Service

LEASE_SECONDS = 15.0
"""How long the fold stays attached after it was last read."""

FoldT = TypeVar("FoldT", bound=Watcher)


class StepWatch(Generic[FoldT]):
    """Attaches the fold that ``make`` creates, on the event loop of the service."""

    def __init__(self, service: Service, make: Callable[[], FoldT], seconds: float = LEASE_SECONDS) -> None:
        self._service = service
        self._make = make
        self._seconds = seconds
        self._fold: FoldT | None = None
        self._end: asyncio.TimerHandle | None = None

    @property
    def attached(self) -> bool:
        """Whether the fold receives events."""
        return self._fold is not None

    def look(self) -> FoldT:
        """The fold, with all steps that have ended. It is attached if it was not, and stays so for ``seconds``."""
        self._service.count()
        if self._fold is None:
            self._fold = self._make()
            self._service.watch(self._fold, tokens=False)
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(self._seconds, self._leave)
        return self._fold

    def _leave(self) -> None:
        if self._fold is not None:
            self._service.unwatch(self._fold)
        self._fold = self._end = None
