"""The LoRA adapters of a server by their names: loaded, replaced and unloaded while it runs.

A name is only what clients ask for. The engine and every cache know an adapter by the digest of its files, so other
weights under the same name share nothing with the earlier ones.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace.core.adapters import AdapterError, AdapterNameError
from headrace.service.engine_process import EngineProcess
from headrace.service.packing import Plain

MAX_REMEMBERED = 10_000
"""Names that are remembered for metrics, of adapters that have been unloaded."""

MAX_SHOWN = 80
"""Characters of a name that a message quotes."""


def _folder(path: str) -> Path:
    """The folder that ``path`` names.

    Raises:
        AdapterError: no folder can have this name.
    """
    try:
        folder = Path(path).expanduser()
        os.fsencode(folder)
    except (RuntimeError, UnicodeEncodeError) as error:
        raise AdapterError(f"the path {path[:MAX_SHOWN]!r} names no folder: {error}") from None
    if "\0" in path:
        raise AdapterError(f"the path {path[:MAX_SHOWN]!r} has a null character")
    return folder


class NamedAdapter(NamedTuple):
    """An adapter that requests may name; ``created`` is when it was loaded, in Unix seconds."""

    name: str
    path: str
    digest: str
    created: int


class Adapters(Protocol):
    """The part of `compute.adapters.store.AdapterStore` that this file uses."""

    def add(self, folder: Path) -> str: ...

    def retire(self, adapter: str) -> None: ...


class UnknownAdapter(LookupError):
    """There is no adapter of this name."""


class KnownAdapters:
    """The adapters that requests may name, for one event loop. Those of another process are `put` here."""

    def __init__(self) -> None:
        self._named: dict[str, NamedAdapter] = {}

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(tuple(self._named.values()))

    def find(self, name: str | None) -> NamedAdapter | None:
        """The adapter of this name, if there is one."""
        return None if name is None else self._named.get(name)

    def put(self, adapters: Iterable[NamedAdapter]) -> None:
        """From now on, there are these."""
        self._named = {each.name: each for each in adapters}


async def _nobody_else() -> None:
    """No other process has to know of a change."""


class AdapterNames(KnownAdapters):
    """The adapters of this process by name.

    ``when_changed`` is awaited when they have changed, before `load` and `unload` return.

    Args:
        store: reads the adapters.
        taken: names of models, which no adapter may have.
    """

    def __init__(self, store: Adapters, taken: Collection[str]) -> None:
        super().__init__()
        self.when_changed: Callable[[], Awaitable[None]] = _nobody_else
        self._store = store
        self._taken = frozenset(taken)
        self._left: dict[str, str] = {}
        self._turn = asyncio.Lock()

    def name_of(self, digest: str) -> str:
        """A name of a loaded adapter, or the last one of an adapter that was unloaded."""
        names = (each.name for each in self._named.values() if each.digest == digest)
        return next(names, None) or self._left.get(digest, "")

    def add(self, name: str, path: str) -> NamedAdapter:
        """Load an adapter; it waits for the disk.

        Raises:
            AdapterError: the name cannot be used, or the files cannot.
        """
        self._check(name, replace=False)
        return self._put(name, path, self._store.add(_folder(path)))

    async def load(self, name: str, path: str, *, replace: bool = False) -> NamedAdapter:
        """Load an adapter beside the event loop. With ``replace`` it takes the name of an earlier one, whose requests
        run on with the earlier weights.

        Raises:
            AdapterError: the name is in use, or the files cannot be used.
        """
        async with self._turn:
            self._check(name, replace=replace)
            digest = await asyncio.to_thread(self._store.add, _folder(path))
            adapter = self._put(name, path, digest)
            await self.when_changed()
            return adapter

    async def unload(self, name: str) -> None:
        """Remove a name. Requests that were accepted run to their end.

        Raises:
            UnknownAdapter: there is no such adapter.
        """
        async with self._turn:
            if name not in self._named:
                raise UnknownAdapter(name)
            self._drop(name)
            await self.when_changed()

    def _check(self, name: str, *, replace: bool) -> None:
        if not name.strip():
            raise AdapterNameError("the name of an adapter must not be empty")
        if not name.isprintable() or name != name.strip() or "," in name:
            raise AdapterNameError(
                f"the name {name[:MAX_SHOWN]!r} has a comma, a control character, or a space at an end, which the name"
                " of an adapter must not have"
            )
        if name in self._taken:
            raise AdapterNameError(f"the name {name!r:.200} is that of a served model")
        if name in self._named and not replace:
            raise AdapterNameError(
                f"the LoRA adapter {name!r:.200} has already been loaded; set load_inplace to true to replace its"
                " weights"
            )

    def _put(self, name: str, path: str, digest: str) -> NamedAdapter:
        if name in self._named and self._named[name].digest != digest:
            self._drop(name)
        adapter = self._named[name] = NamedAdapter(name, path, digest, int(time.time()))
        self._left.pop(digest, None)
        return adapter

    def _drop(self, name: str) -> None:
        left = self._named.pop(name)
        if all(other.digest != left.digest for other in self._named.values()):
            self._store.retire(left.digest)
            self._left[left.digest] = name
            while len(self._left) > MAX_REMEMBERED:
                del self._left[next(iter(self._left))]


# The LoRA adapters of an engine in a process of its own: named in the server's process, read and kept in the
# engine's.
#
#  `adapters.AdapterNames` ── add, retire ──> `RemoteAdapters` ── ASK ──> `AdapterQuestions` ──> the store
#
# Adding one reads files, so the engine's process does it beside the steps. A process that is started in place
# of a lost one gets all adapters before its first request.

ADD, RESTORE, RETIRE = "add_adapter", "restore_adapter", "retire_adapter"

BESIDE = frozenset({ADD})
"""The questions that are answered beside the steps."""

MOST_RETIRED = 64
"""Adapters that another process still gets after their last name was removed, for requests that use them."""


class RemoteAdapters:
    """The `Adapters` of an engine process."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._retired: OrderedDict[str, None] = OrderedDict()

    def add(self, folder: Path) -> str:
        """As `AdapterStore.add`; it waits for the other process.

        Raises:
            AdapterError: the adapter cannot be used.
        """
        given = str(folder.absolute())
        digest, error = self._process.call(lambda: self._process.ask(ADD, given)).result()
        if error is not None:
            raise AdapterError(error)
        self._retired.pop(digest, None)
        self._process.remember(digest, RESTORE, given)
        return str(digest)

    def retire(self, adapter: str) -> None:
        """As `AdapterStore.retire`; it does not wait."""
        self._process.call(lambda: self._process.ask(RETIRE, adapter))
        self._retired[adapter] = None
        while len(self._retired) > MOST_RETIRED:
            self._process.forget(self._retired.popitem(last=False)[0])


class AdapterQuestions:
    """In the engine's process: what `RemoteAdapters` asks of the store."""

    def __init__(self, store: Adapters) -> None:
        self._store = store

    def answer(self, name: str, argument: str) -> Plain:
        """The answer to a question: of an added adapter its digest, or why it cannot be used."""
        if name == RETIRE:
            self._store.retire(argument)
            return None
        try:
            return self._store.add(Path(argument)), None
        except AdapterError as error:
            return None, str(error)
