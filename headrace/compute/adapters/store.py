"""The adapters of a model: known by their folders, some in host memory, and some in the places of the device.

```
 disk ──read, digest compared──► host memory (max_cpu, least recently used) ──prepared──► device (max_loras places)
```
A thread of its own does the reading and preparing, so that no step waits for it. An adapter keeps its place while a
running request uses it. A step holds the prepared adapters of its rows itself, so a place may be given away while the
step is in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.compute.adapters.files import Adapter, read_adapter
from headrace.compute.adapters.layout import AdapterLayout
from headrace.compute.batch import Batch, Ints, adapter_tokens
from headrace.compute.kernels.adapters import LayerChanges
from headrace.core.adapters import AdapterError, AdapterLost
from headrace.core.events import SkipReason
from headrace.core.plan import StepPlan

logger = logging.getLogger(__name__)

WAITED_SECONDS = 1.0
"""How long an adapter that has been brought to the device keeps its place for the request that waits for it."""

AGAIN_SECONDS = 5.0
"""How long requests with an adapter that could not be brought to the device fail, before it is tried again."""

MAX_RETIRED = 1024
"""Adapters that are remembered after their last name was removed, for requests that still wait."""

Prepare = Callable[[LayerChanges], Any]


class _Place:
    """A place of the device: empty while its adapter is on the way.

    ``unused``: no request has started with the adapter since it came; ``asked`` is when one last asked for it.
    """

    def __init__(self, asked: float) -> None:
        self.prepared: Any = None
        self.unused = True
        self.asked = asked


class AdapterStore:
    """Adapters of one model; all methods may be called on any thread.

    Args:
        layout: the modules that adapters may change.
        prepare: converts an adapter for the kernels, on the device.
        dtype: that of activations.
        max_rank: the highest rank of an adapter.
        places: the most adapters on the device.
        host: the most adapters in host memory.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        prepare: Prepare,
        dtype: torch.dtype,
        *,
        max_rank: int,
        places: int,
        host: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout, self._prepare, self._dtype = layout, prepare, dtype
        self._max_rank, self._max_places, self._max_host = max_rank, places, host
        self._clock = clock
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self._retired: OrderedDict[str, None] = OrderedDict()
        self._host: OrderedDict[str, Adapter] = OrderedDict()
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._lost: dict[str, tuple[str, float]] = {}  # why, and until when
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-adapters")

    def add(self, folder: Path) -> str:
        """Read and check the adapter in ``folder``; returns the digest that names it. It waits for the disk.

        Raises:
            AdapterError: the adapter cannot be used.
        """
        adapter = read_adapter(folder, self._layout, self._dtype, self._max_rank)
        with self._lock:
            self._folders[adapter.digest] = folder
            self._retired.pop(adapter.digest, None)
            self._lost.pop(adapter.digest, None)
            self._store(adapter)
        return adapter.digest

    def retire(self, adapter: str) -> None:
        """No new request will use the adapter; those that wait still may."""
        with self._lock:
            self._retired[adapter] = None
            while len(self._retired) > MAX_RETIRED:
                oldest, _ = self._retired.popitem(last=False)
                for known in (self._folders, self._host, self._lost):
                    known.pop(oldest, None)

    def hold(self, adapter: str, used: Callable[[], Set[str]]) -> SkipReason | None:
        """See `core.adapters.Adapters`."""
        with self._lock:
            now, place = self._clock(), self._places.get(adapter)
            if place is not None:
                self._places.move_to_end(adapter)
                place.asked = now
                return None if place.prepared is not None else SkipReason.ADAPTER_LOADING
            why, until = self._lost.get(adapter, ("", now))
            if now < until:
                raise AdapterLost(why)
            if adapter not in self._folders:
                raise AdapterLost("it was unloaded long before the request could start")
            if len(self._places) >= self._max_places:
                taken = used()
                victim = next((each for each in self._places if self._may_leave(each, taken, now)), None)
                if victim is None:
                    every = self._places.keys() <= taken
                    return SkipReason.NO_ADAPTER_PLACE if every else SkipReason.ADAPTER_LOADING
                del self._places[victim]
            self._places[adapter] = _Place(now)
            self._thread.submit(self._bring, adapter)
            return SkipReason.ADAPTER_LOADING

    def prepared(self, adapter: str) -> Any:
        """An adapter for a step, of a request that has started."""
        with self._lock:
            place = self._places[adapter]
            place.unused = False
            return place.prepared

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _may_leave(self, adapter: str, used: Set[str], now: float) -> bool:
        place = self._places[adapter]
        waited_for = place.unused and now - place.asked < WAITED_SECONDS
        return adapter not in used and place.prepared is not None and not waited_for

    def _bring(self, adapter: str) -> None:
        """On the thread: bring an adapter to its place."""
        try:
            prepared = self._prepare(self._in_host_memory(adapter).layers)
        except Exception as error:
            if not isinstance(error, AdapterError):
                logger.exception("a LoRA adapter cannot be brought to the device")
            with self._lock:
                self._lost[adapter] = str(error), self._clock() + AGAIN_SECONDS
                del self._places[adapter]
            return
        with self._lock:
            self._lost.pop(adapter, None)
            self._places[adapter].prepared = prepared

    def _in_host_memory(self, adapter: str) -> Adapter:
        """An adapter in host memory, read again from its folder if it is not there.

        Raises:
            AdapterError: it cannot be read, or its files have changed since it was added.
        """
        with self._lock:
            found = self._host.get(adapter)
            folder = self._folders[adapter]
            if found is not None:
                self._host.move_to_end(adapter)
                return found
        read = read_adapter(folder, self._layout, self._dtype, self._max_rank)
        if read.digest != adapter:
            raise AdapterError("its files have changed since it was loaded; load it again")
        with self._lock:
            self._store(read)
        return read

    def _store(self, adapter: Adapter) -> None:
        self._host[adapter.digest] = adapter
        self._host.move_to_end(adapter.digest)
        while len(self._host) > self._max_host:
            self._host.popitem(last=False)


# The adapter of each slot of a runner, and those of a step's rows.


class SlotAdapters:
    """The adapters of ``slots`` sequences, whose places on the device ``store`` knows; without a store there are none.

    `launched` is called for each plan in turn, on the thread that makes plans, and `begin` when its work begins.
    """

    def __init__(self, store: AdapterStore | None = None, slots: int = 0) -> None:
        self._store = store
        self._named = [""] * slots
        self._launched: deque[Sequence[Any]] = deque()
        self.of_rows: Sequence[Any] = ()
        """The prepared adapter of each row of the step that runs (None: it has none); empty if no row has one."""

    def launched(self, plan: StepPlan) -> None:
        """Find the adapters of a plan's rows, now: a place may be given away while the step is in flight."""
        if self._store is None:
            return
        for entry in plan.entries:
            self._named[entry.slot] = entry.adapter
        names = [self._named[row.slot] for row in plan.rows]
        prepared = {name: self._store.prepared(name) for name in set(names) if name}
        self._launched.append([prepared.get(name) for name in names] if prepared else ())

    def begin(self) -> None:
        """The work of the oldest launched plan begins."""
        if self._store is not None:
            self.of_rows = self._launched.popleft()

    def added(self, batch: Batch, lengths: Ints) -> Batch:
        """The batch of the step that runs with its adapters; ``lengths`` are those of its rows."""
        return replace(batch, adapters=adapter_tokens(self.of_rows, lengths)) if self.of_rows else batch
