"""Embeddings of an engine process: they are those of one process, also when processes end meanwhile."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from headrace.core.embedding import Embedded, EmbeddingSlice, TokenRow
from headrace.core.ports import LOST_PREFIX
from headrace.core.recovery import MOST_LOSSES_OF_REQUEST
from headrace.core.request import FinishReason
from headrace.core.tenancy.gate import Limits
from headrace.service.embedding_models import PoolingModels
from headrace.service.embedding_worker import EmbeddingFailed, EmbeddingJob, EmbeddingWorker
from headrace.service.packing import Plain
from headrace.service.remote_pooling import PoolingQuestions, RemoteBatches
from tests.doubles.engine_processes import Mortal, Successors, running
from tests.doubles.pooling_models import LetterModel
from tests.doubles.services import SOON

pytestmark = pytest.mark.anyio

LIMITS = Limits(100, 1000)


class Processes(Successors):
    """Engine processes with a model; one ends instead of answering a batch with the token ``deadly``."""

    def __init__(self, lasts: list[int] | None = None, deadly: int = -1) -> None:
        super().__init__(lasts or [])
        self.deadly = deadly
        self.models: list[LetterModel] = []
        self.questions: list[PoolingQuestions] = []
        self.connections: list[Mortal] = []

    def run(self, number: int, connection: Mortal) -> None:
        self.models.append(LetterModel())
        self.questions.append(PoolingQuestions(PoolingModels(embedding=self.models[-1])))
        self.connections.append(connection)
        super().run(number, connection)

    def answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> Plain:
        rows = arguments[2] if len(arguments) > 2 and arguments[2] else ()
        if any(self.deadly in row[0] for row in rows):
            self.connections[number].left = 0
        return self.questions[number].answer(name, *arguments)


class House:
    def __init__(self, service: Any, process: Any, seen: Any, processes: Processes) -> None:
        self.service, self.seen, self.processes = service, seen, processes
        self.worker = EmbeddingWorker(service, LIMITS, 0.2, RemoteBatches(process).begin)
        self.model = LetterModel()  # as the server knows it
        self.jobs: list[EmbeddingJob] = []

    def submit(self, *rows: tuple[int, ...]) -> EmbeddingJob:
        name = f"j{len(self.jobs)}"
        given = [TokenRow(tokens) for tokens in rows]
        job = EmbeddingJob(name, "a", "embed", self.model, given, self.service.now())
        self.jobs.append(job)
        self.worker.submit(job)
        return job

    async def result(self, job: EmbeddingJob) -> np.ndarray:
        why = FinishReason.FAILED
        try:
            values = await asyncio.wait_for(asyncio.shield(job.result), SOON)
            why = FinishReason.STOP
            return values
        finally:
            self.worker.end(job, why)


@asynccontextmanager
async def house(processes: Processes):
    async with running(processes) as given:
        made = House(*given, processes)
        yield made
        while len(ends := made.seen.of(Embedded)) < len(made.jobs):
            await asyncio.sleep(0.001)
        assert sorted(event.request_id for event in ends) == sorted(job.id for job in made.jobs)
        assert made.worker.open_calls == made.worker.waiting_tokens == 0
        for _ in range(200):
            if not processes.questions[-1].open:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("a batch was not dropped")


def vectors(rows: tuple[tuple[int, ...], ...]) -> np.ndarray:
    model = LetterModel()
    return np.stack([model._value(TokenRow(row)) for row in rows])


async def test_values_are_those_of_one_process_and_slices_are_reported():
    async with house(Processes()) as h:
        rows = (0, 0, 0), (1,), (2, 2)
        assert np.array_equal(await h.result(h.submit(*rows)), vectors(rows))
        while not (slices := h.seen.of(EmbeddingSlice)):
            await asyncio.sleep(0.001)
        (each,) = slices
        assert [call.tokens for call in each.calls] == [6]
        assert 0 < each.ended - each.began < h.worker.busy_seconds + 1e-9


async def test_an_error_of_the_model_fails_its_call_only():
    async with house(Processes()) as h:
        while not h.processes.models:
            await asyncio.sleep(0.01)
        h.processes.models[0].poison = 9
        bad, good = h.submit((1, 9)), h.submit((2, 2))
        with pytest.raises(EmbeddingFailed):
            await h.result(bad)
        assert np.array_equal(await h.result(good), vectors(((2, 2),)))


async def test_a_batch_for_which_no_call_waits_is_dropped():
    async with house(Processes()) as h:
        while not h.processes.models:
            await asyncio.sleep(0.01)
        model = h.processes.models[0]
        model.endless.set()
        job = h.submit((1, 2))
        assert await asyncio.to_thread(model.begun.wait, SOON)
        h.worker.end(job, FinishReason.CANCELLED)
        assert await asyncio.to_thread(model.closed.wait, SOON)


@pytest.mark.parametrize("seed", range(12))
async def test_calls_go_on_in_the_next_process(seed: int) -> None:
    rng = random.Random(seed)
    processes = Processes([rng.randrange(0, 5) for _ in range(rng.randrange(1, MOST_LOSSES_OF_REQUEST + 1))])
    async with house(processes) as h:
        given = [
            tuple(
                tuple(rng.randrange(26) for _ in range(rng.randrange(1, 9)))
                for _ in range(rng.randrange(1, 6))
            )
            for _ in range(rng.randrange(1, 9))
        ]
        found = await asyncio.gather(*(h.result(job) for job in [h.submit(*rows) for rows in given]))
        for values, rows in zip(found, given, strict=True):
            assert np.array_equal(values, vectors(rows))


async def test_a_call_that_ends_every_process_fails_and_the_others_do_not() -> None:
    async with house(Processes(deadly=7)) as h:
        bad, good = h.submit((1, 7)), h.submit((2, 2))
        with pytest.raises(EmbeddingFailed, match=LOST_PREFIX):
            await h.result(bad)
        assert np.array_equal(await h.result(good), vectors(((2, 2),)))
        assert bad.losses == MOST_LOSSES_OF_REQUEST + 1
        assert len(h.processes.engines) == MOST_LOSSES_OF_REQUEST + 2
