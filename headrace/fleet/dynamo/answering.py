"""Serves Dynamo's requests with a service: one engine request for each, with its events as chunks.

It does not import Dynamo; `backend` connects it to Dynamo's runtime.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from headrace.core.capacity import why_unservable
from headrace.core.constraint import Constraint
from headrace.core.events import Emitted, Finished
from headrace.core.request import FinishReason, InvalidParameter, Request, SamplingParams
from headrace.fleet.dynamo.wire import (
    NEUTRAL_PARAMS,
    REASONS,
    WorkerRequest,
    final_chunk,
    read_request,
    token_chunk,
)
from headrace.service.answer import Answer
from headrace.service.service import Service
from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.fleet")

SEED_BITS = 63


class RequestFailed(Exception):
    """A request ended without its complete output."""


class Answering:
    """Answers requests on the running loop until `drain`.

    Limits of a request: ``max_model_len`` tokens including its output, and ``num_blocks`` KV blocks of ``block_size``
    tokens. Token ids are below ``vocab_size``. ``check`` raises `UnusableConstraint`; it may block.
    ``defaults`` apply where a request gives no sampling parameters.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        check: Callable[[Constraint], None],
        defaults: SamplingParams = NEUTRAL_PARAMS,
    ) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._check = check
        self._defaults = defaults
        self._answers: dict[str, Answer] = {}

    async def generate(self, body: Mapping[str, Any], name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the tokens as they come, and the end. ``name`` identifies the request.

        Raises:
            InvalidParameter, UnusableConstraint: the request cannot be served.
            Refused: the queue is full or the worker drains.
            RequestFailed: it could not be completed.
        """
        asked = read_request(body, self._defaults)
        if asked.params.structured_outputs is not None:
            await asyncio.to_thread(self._check, asked.params.structured_outputs)
        request = self._request(asked, name)
        if problem := why_unservable(request, self.max_model_len, self.num_blocks, self.block_size):
            raise InvalidParameter("token_ids", problem)
        answer = self._answers[name] = self.service.open([request])
        try:
            async for chunk in self._chunks(asked, answer):
                yield chunk
        finally:
            del self._answers[name]
            self.service.close(answer)

    def abort(self, name: str) -> None:
        """Cancel a request of a disconnected client before the engine's next step. Unknown ones have already ended."""
        answer = self._answers.get(name)
        if answer is not None:
            self.service.withdraw(answer, FinishReason.CANCELLED)

    async def drain(self, seconds: float) -> None:
        """Reject new requests, and cancel those that are still open after ``seconds``."""
        if not await self.service.drain(seconds):
            logger.warning("%d requests were cut off", self.service.open_requests())
            self.service.close_all()

    def _request(self, asked: WorkerRequest, name: str) -> Request:
        wrong = next((token for token in asked.tokens if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise InvalidParameter("token_ids", f"token id {wrong}: ids are 0 to {self._vocab_size - 1}")
        return Request(
            id=name,
            tokens=asked.tokens,
            params=asked.params,
            arrived=self.service.now(),
            priority=asked.priority,
            salt=asked.salt,
            seed=secrets.randbits(SEED_BITS) if asked.params.seed is None else asked.params.seed,
            eos_token_ids=self.tokenizer.eos_token_ids | asked.end_tokens,
        )

    async def _chunks(self, asked: WorkerRequest, answer: Answer) -> AsyncGenerator[dict[str, Any], None]:
        while not answer.exhausted:
            for _, event in await answer.read():
                if isinstance(event, Emitted):
                    wanted = asked.params.logprobs
                    yield token_chunk(event.tokens, event.logprobs, self._text, wanted)
                elif isinstance(event, Finished):
                    if event.reason not in REASONS:
                        raise RequestFailed(event.message or str(event.reason))
                    (cached,) = answer.cached_tokens
                    yield final_chunk(event.reason, len(asked.tokens), cached, event.output_tokens)

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])
