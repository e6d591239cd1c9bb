"""Ports: the interfaces that the core needs from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from headrace.core.constraint import Constraint
from headrace.core.events import Event
from headrace.core.plan import StepOutput, StepPlan

LOST_PREFIX = "a part of the model was lost: "
"""The beginning of the message of a request that failed because of `RunnerLost`."""


class RunnerLost(RuntimeError):
    """The runner has lost the keys and values of all blocks, and restarts at the next launch."""

    def __init__(self, why: str) -> None:
        super().__init__(LOST_PREFIX + why)


class Runner(Protocol):
    """Turns plans into tokens: the torch runner, the simulator, or a test double.

    Plans are executed in the order of their launch. `collect` blocks until the oldest uncollected plan is done, and
    returns its output. A runner fails a single row through `StepOutput.failures`. After `RunnerLost` running
    requests are computed again, within the limits of `core.recovery`; any other exception ends the engine.
    """

    def launch(self, plan: StepPlan, now: float) -> None: ...

    def collect(self) -> StepOutput: ...


class Grammars(Protocol):
    """Compiles the constraints of requests on background threads, and caches some of them."""

    def ready(self, constraint: Constraint) -> bool:
        """Whether ``constraint`` is compiled; if not, starts compiling. Returns at once.

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
        """Whether ``text`` completely satisfies ``constraint``, and is not only a valid beginning."""
        ...


class Watcher(Protocol):
    """A fold over the event stream.

    If it also has ``fold_tokens(emitted, now)``, that gets the `Emitted` events of a step that follow each other in one
    call, which takes less time than one call for each. If its ``fold_tokens`` is None, it gets none of them.
    """

    def fold(self, event: Event, now: float) -> None: ...


class ValueTooLarge(Exception):
    """A store never accepts a value of this size; its message names the size and the limit, both in bytes."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(f"a response of {nbytes:,} bytes is not stored: the limit is {limit:,}")


class StoreFacts(NamedTuple):
    """The size of a store; None where it is unknown. ``evictions`` counts entries dropped for lack of room."""

    entries: int | None
    nbytes: int | None
    evictions: int


class Store(Protocol):
    """A response store: bytes under 32-byte keys, for a limited time and as long as there is room.

    It may lose entries at any time and raise any exception: the cache treats both as a miss. `put` raises
    `ValueTooLarge` for a value that it would refuse every time, which does not count as a failure. ``tags`` are what
    `clear` selects by. A tag's version counts its invalidations. A store that outlives the process or is shared also
    stores the versions, so that other processes learn of an invalidation through `versions`. Such a store may be down
    during an invalidation, or lose the versions: `advance` adds to them and deletes nothing.
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
    """Turns texts into unit vectors, each as packed float32 of ``dimensions``; None for a text that is too long.

    Vectors of embedders with equal ``name`` are comparable. It serves one thread at a time.
    """

    name: str
    dimensions: int

    def embed(self, texts: Sequence[str]) -> Sequence[bytes | None]: ...
