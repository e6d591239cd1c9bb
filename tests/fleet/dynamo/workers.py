"""A worker over the hashing engine and the built-in tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace.compute.model.hub import resolve_folder
from headrace.core.tenancy.gate import Limits
from headrace.fleet.dynamo.answering import Answering
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import HashingRunner
from headrace.text.tokenizer import Tokenizer

BLOCK_SIZE = 4


class Worker(Answering):
    """It says which runner computes."""

    runner: HashingRunner


def make_answering(**engine: Any) -> Worker:
    made, runner = hashing_engine(block_size=BLOCK_SIZE, **engine)
    worker = Worker(
        Service(made, Limits(64, 10_000)),
        Tokenizer.from_folder(resolve_folder("builtin")),
        max_model_len=200,
        vocab_size=1000,
        block_size=BLOCK_SIZE,
        num_blocks=made.scheduler.pool.num_blocks,
        check=lambda constraint: None,
    )
    worker.runner = runner
    return worker


@asynccontextmanager
async def answering(**engine: Any) -> AsyncIterator[Worker]:
    made = make_answering(**engine)
    made.service.start()
    try:
        yield made
    finally:
        made.service.stop()


def body(*tokens: int, max_tokens: int = 5, **sampling: Any) -> dict[str, Any]:
    return {
        "token_ids": list(tokens or (1, 2, 3)),
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {"seed": 1, **sampling},
    }


async def collected(chunks: AsyncIterator[dict[str, Any]]) -> tuple[list[int], list[dict[str, Any]]]:
    """The tokens of an output, and all chunks."""
    seen = [chunk async for chunk in chunks]
    return [token for chunk in seen for token in chunk["token_ids"]], seen
