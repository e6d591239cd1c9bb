"""`AsyncLLM`: the engine on its own thread, for asyncio, without a server."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from headrace.config import ConfigError
from headrace.core.events import Admitted, Event, Finished
from headrace.core.request import FinishReason, SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.llm.embedding import OutputT, PoolingTask, embedding_task, pairs_of, score_task
from headrace.llm.images import ChatImages, Message, has_images
from headrace.llm.job import AdapterChoice, Job, JobMaker, Prompt, each_prompt, engine_options
from headrace.llm.options import LLMOptions
from headrace.llm.outputs import CompletionDelta, EmbeddingOutput, RequestOutput, ScoreOutput
from headrace.service.embedding_worker import EmbeddingJob, EmbeddingWorker
from headrace.service.service import Service
from headrace.text.stream import TextStreams
from headrace.wiring.embedding import load_pooling, runs_pooling, with_served
from headrace.wiring.engine import make_ledger, make_pricing
from headrace.wiring.image_encoding import slices_beside
from headrace.wiring.model import Loaded, close, load

ALL_MAY_WAIT = Limits(1 << 62, 1 << 62)


class AsyncLLM:
    """A model and its engine, for any number of tasks of one event loop.

    Requests of concurrent tasks are batched. Cancelling a task, or leaving the loop over a stream, cancels its requests
    before the next step. Use it as an asynchronous context manager to release thread, memory and files at the end of
    the block. Loading blocks: construct it before the event loop runs, or with ``asyncio.to_thread``.

    Args:
        model: a local folder, a GGUF file, a hub name, or ``"builtin"``.
        given: options of the model, the KV cache and the scheduler, as in `LLM`.

    Raises:
        ConfigError: an option is invalid, or the model cannot be loaded.
    """

    def __init__(self, model: str = "builtin", **given: Unpack[LLMOptions]) -> None:
        options = engine_options(model, given)
        if runs_pooling(options.model):
            raise ConfigError(
                f"{model} generates no text: name it with embedding_model or rerank_model, or use LLM"
            )
        pricing = make_pricing(options.cost)
        pooling = load_pooling(options)
        self.loaded: Loaded = load(options)
        self._pooling = with_served(pooling, options, self.loaded)
        controls = self.loaded.controls
        self._ledger = make_ledger(pricing, lambda: controls.counts.coefficients)
        self.tokenizer = self.loaded.tokenizer
        streams = TextStreams(self.tokenizer)
        self._service = Service(self.loaded.engine, ALL_MAY_WAIT)
        slices = slices_beside(self.loaded.engine, self.loaded.facts.kind, self._service.between_steps)
        self._images = ChatImages(self.loaded.images, options.images, slices)
        self._make = JobMaker(self.loaded, self._images, lambda: streams)
        self._admitted = _AdmissionTimes()
        self._service.watch(self._admitted)
        self._service.watch(self._ledger)
        self._worker = EmbeddingWorker(self._service, ALL_MAY_WAIT, options.server.mixed_embedding_ratio)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all requests, stop the engine thread, and release memory and files. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            await self._worker.stop()
            self._service.close_all()
            await asyncio.sleep(0)  # lets the readers of these requests receive their end
        self._images.close()
        if self._service.stop():
            close(self.loaded)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of calls that give none: those of the model's ``generation_config.json``."""
        return self.loaded.defaults.params

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids), ``n`` times, with the adapter ``lora_request`` if there is one.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidParameter: a prompt or parameter is invalid; nothing was run.
        """
        self._start()
        return await self._run(
            self._make.completions(prompts, sampling_params, n, lora_request, streamed=False)
        )

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template; see `LLM.chat`."""
        self._start()
        make = partial(self._make.chats, messages, sampling_params, n, lora_request, streamed=False)
        return await self._run(await asyncio.to_thread(make) if has_images(messages) else make())

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
    ) -> AsyncGenerator[CompletionDelta]:
        """Like `generate`, but yields a delta of each completion at every step.

        Raises:
            InvalidParameter: a prompt or parameter is invalid; raised by the call, before the first delta.
        """
        return self._stream(
            self._make.completions(prompts, sampling_params, n, lora_request, streamed=True), interval=1
        )

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
    ) -> AsyncGenerator[CompletionDelta]:
        """Like `chat`, but yields a delta of each completion at every step.

        Images are read before the first delta, which raises their errors.
        """
        make = partial(self._make.chats, messages, sampling_params, n, lora_request, streamed=True)
        return self._stream_made(make) if has_images(messages) else self._stream(make(), interval=1)

    async def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Convert each input (text, or token ids) to a vector, by ``embedding_model``; see `LLM.embed`.

        The engine thread computes it between its steps. Cancelling the task cancels it.

        Raises:
            ConfigError: there is no embedding model.
            InvalidParameter: an input or parameter is invalid; nothing was computed.
        """
        make = partial(
            embedding_task,
            self._pooling,
            each_prompt(inputs, "inputs"),
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            truncate=truncate_prompt_tokens,
        )
        return await self._compute(make)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """Score one query with each document, or each query with its document; see `LLM.score`.

        Raises:
            ConfigError: there is no model for it.
            InvalidParameter: a text or parameter is invalid; nothing was computed.
        """
        pairs = pairs_of(queries, documents)
        return await self._compute(partial(score_task, self._pooling, pairs, truncate_prompt_tokens))

    async def _compute(self, make: Callable[[], PoolingTask[OutputT]]) -> list[OutputT]:
        self._start()
        task = await asyncio.to_thread(make)
        if not task.rows:
            return []
        name = f"{task.task}-{secrets.token_hex(12)}"
        job = EmbeddingJob(name, "default", task.task, task.model, task.rows, self._service.now())
        why = FinishReason.CANCELLED
        try:
            self._worker.submit(job)
            values = await job.result
            why = FinishReason.STOP
        finally:
            self._worker.end(job, why)
        return task.outputs(values)

    async def _run(self, job: Job) -> list[RequestOutput]:
        async for _ in self._stream(job, interval=0):
            pass
        return job.outputs

    async def _stream_made(self, make: Callable[[], Job]) -> AsyncGenerator[CompletionDelta]:
        self._start()
        async with aclosing(self._stream(await asyncio.to_thread(make), interval=1)) as deltas:
            async for delta in deltas:
                yield delta

    async def _stream(self, job: Job, interval: int) -> AsyncGenerator[CompletionDelta]:
        self._start()
        if not job.requests:
            return
        answer = self._service.open(job.requests, interval)
        self._admitted.expect(job)
        try:
            while not answer.exhausted:
                for index, event in await answer.read():
                    now = self._service.now()
                    began = self._admitted.of(event.request_id, now)
                    job.admit(event.request_id, answer.cached_tokens[index], began)
                    if job.take(event, now):
                        self._service.stop_sequence(answer, index)
                    elif isinstance(event, Finished):
                        self._service.count()
                        job.charge(event.request_id, self._ledger.cost(event.request_id))
                for ended in job.ended():
                    self._make.learn(job, ended)
                for delta in job.deltas():
                    yield delta
        finally:
            self._service.close(answer)
            self._admitted.forget(job)

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this AsyncLLM is closed")
        loop = asyncio.get_running_loop()
        with self._starting:
            if self._loop is None:
                self._loop = loop
                self._service.start()
        if self._loop is not loop:
            raise RuntimeError("this AsyncLLM belongs to another event loop, in which it was first used")


class _AdmissionTimes:
    """A `core.ports.Watcher` that records when open requests started to run."""

    fold_tokens = None

    def __init__(self) -> None:
        self._times: dict[str, float | None] = {}

    def expect(self, job: Job) -> None:
        self._times |= dict.fromkeys(job.open)

    def forget(self, job: Job) -> None:
        for request in job.requests:
            self._times.pop(request.id, None)

    def of(self, request_id: str, now: float) -> float:
        """The time of a request's admission; ``now`` if it was admitted in the step that is being delivered."""
        return self._times.get(request_id) or now

    def fold(self, event: Event, now: float) -> None:
        if (
            isinstance(event, Admitted)
            and event.request_id in self._times
            and not self._times[event.request_id]
        ):
            self._times[event.request_id] = now
