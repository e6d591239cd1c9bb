"""Makes snapshots for all listeners: once a second, each topic once, and only while there are listeners.

A listener has no queue. A slow one misses snapshots and receives the newest one next, so memory is bounded.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple, Protocol

from headrace.service.service import Service

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Time between two snapshots."""

MOST_LISTENERS = 100
"""Maximum number of streams at the same time."""


class Topic(NamedTuple):
    """The contents of a stream: a part in addition to the overview (empty: none), and the tenant (None: all)."""

    part: str
    tenant: str | None


class Snapshots(Protocol):
    """Makes snapshots: `observe.dashboard`."""

    def measure(self, now: float) -> None: ...

    def snapshot(self, part: str, tenant: str | None, now: float) -> Mapping[str, Any]: ...


class Broadcast:
    """Runs on the server's loop; ``snapshots`` are made there, after all events so far have been folded."""

    def __init__(self, service: Service, snapshots: Snapshots, seconds: float = SECONDS) -> None:
        self._service = service
        self._snapshots = snapshots
        self._seconds = seconds
        self._listeners: Counter[Topic] = Counter()
        self._newest: dict[Topic, bytes] = {}
        self._made = asyncio.Event()  # replaced at each round
        self._task: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        """Whether no further stream is accepted."""
        return self._listeners.total() >= MOST_LISTENERS

    @property
    def listening(self) -> bool:
        """Whether snapshots are being made."""
        return self._task is not None

    async def follow(self, topic: Topic) -> AsyncGenerator[bytes]:
        """Snapshots of a topic as server-sent events, the first one at once, until the server drains."""
        self._listeners[topic] += 1
        try:
            if self._task is None:
                self._measure()
                self._task = asyncio.create_task(self._run())
            if topic not in self._newest:
                self._newest[topic] = self._make(topic)
            while True:
                made = self._made
                yield self._newest[topic]
                await made.wait()
                if self._service.draining:
                    return
        finally:
            self._leave(topic)

    def _leave(self, topic: Topic) -> None:
        self._listeners[topic] -= 1
        if not self._listeners[topic]:
            del self._listeners[topic]
            self._newest.pop(topic, None)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                self._round()
            except Exception:
                logger.exception("no snapshot could be made")

    def _round(self) -> None:
        self._measure()
        for topic in self._listeners:
            self._newest[topic] = self._make(topic)
        made, self._made = self._made, asyncio.Event()
        made.set()

    def _measure(self) -> None:
        self._service.count()
        self._snapshots.measure(self._service.now())

    def _make(self, topic: Topic) -> bytes:
        snapshot = self._snapshots.snapshot(topic.part, topic.tenant, self._service.now())
        return b"data: " + json.dumps(snapshot, separators=(",", ":")).encode() + b"\n\n"
