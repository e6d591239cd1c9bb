"""All that the core asks of the world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.core.cache.partial.unfinished_answers import UnfinishedAnswer
from headrace.core.cache.response.entry import Entry, Hit, Miss, Served, StoreFacts
from headrace.core.cache.response.query import CacheQuery
from headrace.core.constraint import Constraint
from headrace.core.events import Event, Layer
from headrace.core.plan import StepOutput, StepPlan


class Runner(Protocol):
    """Turns plans into tokens: the torch runner, the simulator, or a test double.

    Plans are executed in the order of their launch; `collect` returns the output of the oldest plan not yet
    collected and blocks until it is there. A runner fails a single row through `StepOutput.failures`; what it
    raises ends the engine.
    """

    def launch(self, plan: StepPlan, now: float) -> None: ...

    def collect(self) -> StepOutput: ...


class Grammars(Protocol):
    """Compiles the constraints of requests, beside the engine's loop, and remembers some of them."""

    def ready(self, constraint: Constraint) -> bool:
        """Whether ``constraint`` is compiled; if not, that begins now. It returns at once.

        Raises:
            UnusableConstraint: it cannot be compiled.
        """
        ...

    def check(self, constraint: Constraint) -> None:
        """Wait until ``constraint`` is compiled; for any thread that may wait.

        Raises:
            UnusableConstraint: it cannot be compiled.
        """
        ...

    def is_complete(self, constraint: Constraint, text: str) -> bool:
        """Whether ``text`` is all that ``constraint`` asks for, and not its beginning."""
        ...


class Watcher(Protocol):
    """A fold over the event stream."""

    def fold(self, event: Event, now: float) -> None: ...


class Store(Protocol):
    """Keeps bytes under 32-byte keys, for some time and as long as there is room.

    It may forget at any moment, and raise whatever it likes: who asks it takes that for a miss. ``tags`` are what
    `clear` goes by. A tag's version counts its clearings; a store that outlives the process or is shared keeps the
    versions too, so that other processes learn of a clearing through `versions`. It may be away during a clearing, or
    lose them: `advance` raises versions by so much each, and deletes nothing.
    """

    name: str

    async def get(self, key: bytes) -> bytes | None: ...

    async def put(self, key: bytes, value: bytes, ttl: float, tags: tuple[str, ...]) -> None: ...

    async def delete(self, key: bytes) -> None: ...

    async def clear(self, tag: str) -> None: ...

    async def versions(self) -> Mapping[str, int]: ...

    async def advance(self, steps: Mapping[str, int]) -> None: ...

    def facts(self) -> StoreFacts: ...

    async def close(self) -> None: ...


class Embedder(Protocol):
    """Texts to vectors of length one, each as packed float32 of ``dimensions``; None for a text that is too long.

    ``name`` is equal where vectors are comparable. For one thread at a time.
    """

    name: str
    dimensions: int

    def embed(self, texts: Sequence[str]) -> Sequence[bytes | None]: ...


class Level(Protocol):
    """Another way to answer without computing, asked after the exact cache has missed; `start` is on the loop."""

    layer: Layer

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def find(self, ask: CacheQuery) -> Hit | Miss: ...

    def facts(self) -> Mapping[str, StoreFacts]: ...


class Keeper(Protocol):
    """Is told what becomes of answers that may be kept; it must return at once.

    ``kept``: an answer is whole. ``broken_off``: one ended before it was. ``cleared``: everything with a tag must be
    forgotten. ``barred``: an answer was wrong.
    """

    def kept(self, ask: CacheQuery, entry: Entry) -> None: ...

    def broken_off(self, ask: CacheQuery, beginning: UnfinishedAnswer) -> None: ...

    def cleared(self, tag: str) -> None: ...

    def barred(self, served: Served) -> None: ...
