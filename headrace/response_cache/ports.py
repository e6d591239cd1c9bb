"""What the response caches ask of their levels, of those who listen to them, and of stores that share rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from headrace.core.drafting.suffix import ProposalCounts
from headrace.core.events import Layer
from headrace.core.ports import StoreFacts
from headrace.response_cache.partial import UnfinishedAnswer
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.entry import Entry, Hit, Miss, Served
from headrace.response_cache.rules.pairs import SeenPair


class Level(Protocol):
    """A further cache level, looked up after the exact cache has missed; `start` runs on the event loop.

    ``state`` is what it reports beside its counts, as plain values for JSON; with a ``tenant``, only of it.
    ``lines`` are for the terminal.
    """

    layer: Layer

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def find(self, query: CacheQuery) -> Hit | Miss: ...

    def facts(self) -> Mapping[str, StoreFacts]: ...

    def state(self, tenant: str | None = None) -> Mapping[str, Any]: ...

    def lines(self) -> Sequence[str]: ...


class PastOutputs(Protocol):
    """The engine's index of past outputs, which is cleared with the caches; both may be used at any time."""

    @property
    def counts(self) -> ProposalCounts: ...

    def forget(self, tenant: str | None = None) -> None: ...


class LabelledPairs(Protocol):
    """The pairs that the semantic cache took for the same, and their labels; ``labelled``: labels can be stored.

    ``name`` is what their scores are made with.
    """

    name: str
    labelled: bool

    def export(self, tenant: str | None = None) -> Sequence[SeenPair]: ...

    def label(self, labelled: Sequence[tuple[SeenPair, bool]]) -> Mapping[str, Any]: ...


class CacheListener(Protocol):
    """Listens to the response caches; every method must return at once.

    ``stored``: a complete response was stored. ``interrupted``: a response ended before it was complete. ``cleared``:
    all entries with a tag were invalidated. ``barred``: a response was reported as wrong.
    """

    def stored(self, query: CacheQuery, entry: Entry) -> None: ...

    def interrupted(self, query: CacheQuery, beginning: UnfinishedAnswer) -> None: ...

    def cleared(self, tag: str) -> None: ...

    def barred(self, served: Served) -> None: ...


class Change(NamedTuple):
    """A key that changed, and its row now; None if there is none any more."""

    key: bytes
    row: bytes | None


class WrittenRow(NamedTuple):
    """A row to write under a key, for ``ttl`` seconds. `core.ports.Store.clear` of one of its ``tags`` deletes it."""

    key: bytes
    row: bytes
    ttl: float
    tags: tuple[str, ...]


class RowFeed(Protocol):
    """The shared rows of one space. ``ready``: the store has been reached, so rows can be read and written.

    Rows are opaque bytes. A space is what they have in common so that they can be used: `open_feed` gets its name.
    ``read`` returns at most ``most`` changes that others have made since it was called last, oldest first; fewer if
    there are no more. Rows are those of now, so a change may be read twice, or together with a later one of the same
    key.
    """

    @property
    def ready(self) -> bool: ...

    async def read(self, most: int) -> Sequence[Change]: ...

    async def write(self, rows: Sequence[WrittenRow], deleted: Sequence[bytes]) -> None: ...


@runtime_checkable
class SharesRows(Protocol):
    """A `core.ports.Store` that can share rows."""

    def open_feed(self, space: bytes) -> RowFeed: ...
