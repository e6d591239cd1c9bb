"""The memory of a model that sleeps: keys and values are given back to the system, and the weights are dropped.

```
 sleep(kv_cache)   finish steps, preempt, empty the prefix cache ──> blocks, host pages and states back to the system
 sleep(weights)    finish steps ──> the decoder drops its weights
 wake_up(weights)  the same files, read again          wake_up(kv_cache)  blank blocks, in memory with their next use
```
It is called between two steps, on the engine's thread. `service.sleep` decides what happens to requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from headrace.compute.checkpoint import ModelError
from headrace.compute.device import apart, freeing_at_once, resident_bytes, return_freed_memory
from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.model.decoder import ModelDecoder
from headrace.config import ConfigError, ModelOptions
from headrace.core.engine import Engine
from headrace.service.sleep import MemoryReport, Part
from headrace.wiring.loading.computing import load_computing
from headrace.wiring.loading.text import weight_files

FileIdentity = tuple[str, int, int, int]
"""Name, size, time of the last change in nanoseconds, and inode."""


def file_identities(paths: Iterable[Path]) -> tuple[FileIdentity, ...]:
    """What tells, without reading them, whether files have changed; in the order of their names. Links to nothing are
    left out: reading the weights names them.
    """
    stats = ((path.name, path.stat()) for path in paths if path.exists())
    return tuple(sorted((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in stats))


class NotRestored(Exception):
    """Weights could not be loaded again; the message says why."""


class Weights(Protocol):
    """The weights of a model, which can be dropped and loaded again."""

    def drop(self) -> None: ...

    def restore(self) -> None:
        """Load them again.

        Raises:
            NotRestored: they could not be loaded.
        """
        ...


class LoadedWeights:
    """The weights of ``decoder``, which were read from the files ``loaded`` of ``folder``.

    ``release`` makes the runner forget what it holds of them.
    """

    def __init__(
        self,
        decoder: ModelDecoder,
        release: Callable[[], None],
        model: ModelOptions,
        folder: Path,
        loaded: tuple[FileIdentity, ...],
    ) -> None:
        self._decoder = decoder
        self._release = release
        self._model = model
        self._folder = folder
        self._loaded = loaded

    def drop(self) -> None:
        """Free them."""
        with freeing_at_once():
            self._release()
            self._decoder.drop_weights()

    def restore(self) -> None:
        """See `Weights.restore`. Changed files are refused: cached responses would be those of the old weights."""
        self._check_files()
        try:
            computing = apart(lambda: load_computing(self._model, self._folder, with_fingerprint=False))
        except (ModelError, ConfigError, KernelsUnavailable, OSError, RuntimeError) as error:
            raise NotRestored(f"the weights could not be loaded: {error}") from error
        self._check_files()
        self._decoder.take_weights(computing.decoder)

    def _check_files(self) -> None:
        try:
            found = file_identities(weight_files(self._folder))
        except (OSError, ModelError) as error:
            raise NotRestored(f"the weight files of {self._folder} cannot be read: {error}") from error
        if found != self._loaded:
            raise NotRestored(
                f"the weight files of {self._folder} have changed since the server started; restart the server to"
                " serve them"
            )


class SleepingMemory:
    """`service.sleep.Memory` of an engine in this process; ``clear`` gives back all memory of keys and values."""

    def __init__(self, engine: Engine, clear: Callable[[], None], weights: Weights) -> None:
        self._engine = engine
        self._clear = clear
        self._weights = weights
        self._sleeping: frozenset[Part] = frozenset()

    def sleep(self, parts: tuple[Part, ...]) -> MemoryReport:
        """Free parts that do not sleep yet."""
        before, new = resident_bytes(), frozenset(parts) - self._sleeping
        if new:
            self._engine.sleep(self._clear if Part.KV_CACHE in new else None)
            if Part.WEIGHTS in new:
                self._weights.drop()
            self._sleeping |= new
            return_freed_memory()
        return self._report(before)

    def wake_up(self, parts: tuple[Part, ...]) -> MemoryReport:
        """Restore parts that sleep; the engine continues when none sleeps any more."""
        before, due = resident_bytes(), self._sleeping & frozenset(parts)
        if Part.WEIGHTS in due:
            try:
                self._weights.restore()
            except NotRestored as error:
                return self._report(before, str(error))
        self._sleeping -= due
        if due and not self._sleeping:
            self._engine.wake_up()
        return self._report(before)

    def _report(self, before: int, problem: str = "") -> MemoryReport:
        sleeping = tuple(part for part in Part if part in self._sleeping)
        return MemoryReport(sleeping, before, resident_bytes(), problem)
