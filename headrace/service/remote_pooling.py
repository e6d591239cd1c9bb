"""Embeddings and scores of an engine in a process of its own: its process has the models, the server's the calls.

```
 server: POOL number, model, rows ──> engine's process: a batch, for the time of a slice, between two steps
        <── seconds; values, if it is complete
         POOL number ──> the next slice
         DROP number ──> no call waits for the batch any more
```
`EmbeddingWorker` admits calls and chooses batches as in one process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from headrace.core.embedding import EmbeddingSlice, SlicedCall, TokenRow
from headrace.service.embedding_models import PoolingModel, PoolingModels, Values
from headrace.service.embedding_worker import BatchLost, Slice, advance
from headrace.service.engine_process import EngineProcess, ProcessLost
from headrace.service.packing import Plain

POOL, DROP = "pool", "drop_pool"

POOLING_QUESTIONS = frozenset({POOL, DROP})


class RemoteBatches:
    """The batches of an `EmbeddingWorker` whose models are in an engine's process."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._numbers = itertools.count()

    def begin(
        self, model: PoolingModel, rows: Sequence[TokenRow], calls: tuple[SlicedCall, ...]
    ) -> _RemoteBatch:
        """A batch that has not begun: its first slice sends the rows."""
        return _RemoteBatch(self._process, next(self._numbers), model.name, rows, calls)


class _RemoteBatch:
    """A batch that the engine's process computes."""

    def __init__(
        self,
        process: EngineProcess,
        number: int,
        model: str,
        rows: Sequence[TokenRow],
        calls: tuple[SlicedCall, ...],
    ) -> None:
        self._process = process
        self._number = number
        self._model = model
        self._rows: list[tuple[Any, ...]] | None = [tuple(row) for row in rows]  # None: they have been sent
        self._calls = calls
        self._complete = False

    async def advance(self, seconds: float) -> Slice:
        """See `Batch.advance`."""
        rows, self._rows = self._rows, None
        posted = self._process.post(POOL, self._number, self._model, rows, seconds)
        try:
            answer = await asyncio.wrap_future(posted)
        except ProcessLost as lost:
            raise BatchLost(str(lost)) from None
        if answer is None:  # another process, which does not have the batch
            raise BatchLost("the engine was started again")
        taken, longest, shape, values = answer
        now = self._process.now()
        self._process.tell(EmbeddingSlice(now - taken, now, self._calls))
        self._complete = shape is not None
        found = np.frombuffer(values, np.float32).reshape(shape) if self._complete else None
        return Slice(found, taken, longest)

    def close(self) -> None:
        """Let the process forget it, unless it is complete."""
        if not self._complete:
            self._process.post(DROP, self._number)


class PoolingQuestions:
    """In the engine's process, on the engine thread: answers the questions of `RemoteBatches` with ``models``."""

    def __init__(self, models: PoolingModels) -> None:
        self._models = {model.name: model for model in models.all()}
        self._computing: dict[int, Generator[None, None, Values]] = {}

    @property
    def open(self) -> int:
        """Number of batches that have begun and not ended."""
        return len(self._computing)

    def answer(self, name: str, number: int, *given: Any) -> Plain:
        """The seconds of a slice, those of its longest part, and shape and bytes of the values if they are complete.

        None if the batch is not here.
        """
        if name == DROP:
            self._drop(number)
            return None
        model, rows, seconds = given
        if rows is not None:
            self._computing[number] = self._models[model].run([TokenRow(*row) for row in rows])
        computing = self._computing.get(number)
        if computing is None:
            return None
        try:
            values, taken, longest = advance(computing, seconds)
        except Exception:
            self._drop(number)
            raise
        if values is None:
            return taken, longest, None, None
        self._drop(number)
        values = np.ascontiguousarray(values, np.float32)
        return taken, longest, values.shape, values.tobytes()

    def _drop(self, number: int) -> None:
        if (computing := self._computing.pop(number, None)) is not None:
            computing.close()
