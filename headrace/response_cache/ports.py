"""What the response caches query of their levels and of those who listen to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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
