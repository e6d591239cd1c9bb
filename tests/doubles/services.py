"""What tests of a service share: requests, a watcher, holds on the engine, and what an answer reported."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

from headrace.core.events import Emitted, Finished
from headrace.core.request import Request, SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine

SOON = 60.0


def request(name: str, max_tokens: int = 5, prompt=(1, 2, 3), **more) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), **more)


class Book:
    """A watcher; it may be broken."""

    def __init__(self, broken: bool = False) -> None:
        self.events = []
        self.threads = set()
        self.broken = broken

    def fold(self, event, now):
        self.events.append(event)
        self.threads.add(threading.get_ident())
        if self.broken:
            raise ZeroDivisionError


class Gate:
    """Holds the engine between two steps, so that a test sees things in order."""

    def __init__(self, service: Service) -> None:
        self.open = threading.Event()
        service.thread.call(lambda: self.open.wait(SOON))


class Leash:
    """Lets a runner launch a few steps, and more when a test says so."""

    def __init__(self, runner, steps: int) -> None:
        self.free = threading.Event()
        self._left = steps
        self._launch = runner.launch
        runner.launch = self._held

    def _held(self, plan, now):
        if not self._left:
            self.free.wait(SOON)
        self._left = max(0, self._left - 1)
        self._launch(plan, now)


@asynccontextmanager
async def serving(limits=None, watchers=(), stall_seconds=60.0, **engine):
    made, runner = hashing_engine(**engine)
    service = Service(made, limits or Limits(64, 10_000), watchers, stall_seconds=stall_seconds)
    service.runner = runner
    service.engine = made
    service.start()
    try:
        yield service
    finally:
        service.stop()


async def read_all(answer):
    reported = []
    while not answer.exhausted:
        reported += await asyncio.wait_for(answer.read(), SOON)
    return reported


def tokens_of(reported, index=0):
    return [t for i, event in reported if i == index and isinstance(event, Emitted) for t in event.tokens]


def end_of(reported, index=0):
    ends = [event for i, event in reported if i == index and isinstance(event, Finished)]
    assert len(ends) == 1
    return ends[0].reason
