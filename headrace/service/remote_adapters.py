"""The LoRA adapters of an engine in a process of its own: named in the server's process, read and kept in the engine's.

```
 `adapters.AdapterNames` ── add, retire ──> `RemoteAdapters` ── ASK ──> `AdapterQuestions` ──> the store
```
Adding one reads files, so the engine's process does it beside the steps. A process that is started in place of a lost
one gets all adapters before its first request.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from headrace.core.adapters import AdapterError
from headrace.service.adapters import Adapters
from headrace.service.engine_process import EngineProcess
from headrace.service.packing import Plain

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
