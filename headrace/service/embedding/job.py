"""One call to an embedding model or a cross-encoder: its inputs, and the results as they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from headrace.core.embedding import TokenRow
from headrace.core.tenancy.quota import Charge
from headrace.service.embedding.models import PoolingModel, Values


class EmbeddingFailed(RuntimeError):
    """The model raised while it computed the call's inputs."""


class EmbeddingJob:
    """The inputs ``rows`` of one call, computed by ``model``. Create it on the event loop that awaits `result`."""

    def __init__(
        self, id: str, tenant: str, task: str, model: PoolingModel, rows: Sequence[TokenRow], arrived: float
    ) -> None:
        self.id = id
        self.tenant = tenant
        self.task = task
        self.model = model
        self.rows = tuple(rows)
        self.tokens = sum(len(row.tokens) for row in rows)
        self.computed_tokens = 0
        self.arrived = arrived
        self.hold: Charge | None = None
        self.result: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self._values: list[Values | None] = [None] * len(self.rows)
        self._missing = len(self.rows)

    @property
    def open(self) -> bool:
        """Whether its result is still awaited."""
        return not self.result.done()

    def put(self, index: int, values: Values) -> None:
        """Store the result of one input."""
        self._values[index] = values
        self._missing -= 1
        self.computed_tokens += len(self.rows[index].tokens)

    @property
    def complete(self) -> bool:
        """Whether all inputs have been computed."""
        return not self._missing

    def finish(self) -> None:
        """Deliver the results [inputs, numbers]."""
        self.result.set_result(np.stack([each for each in self._values if each is not None]))
