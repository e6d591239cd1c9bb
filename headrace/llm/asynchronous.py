"""`AsyncLLM`: the engine on its own thread, used from asyncio as the server uses it, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, Unpack

from headrace.build.engine import make_ledger, make_pricing
from headrace.build.model import Loaded, close, load
from headrace.config import ConfigError
from headrace.core.events import Admitted, Event, Finished
from headrace.core.request import SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.llm.job import Job, JobMaker, Message, Prompt
from headrace.llm.options import LLMOptions
from headrace.llm.outputs import CompletionDelta, RequestOutput
from headrace.llm.settings import engine_options
from headrace.serve.service import Service
from headrace.serve.text.stream import TextStreams

ALL_MAY_WAIT = Limits(1 << 62, 1 << 62)


class AsyncLLM:
    """A model and its engine, for any number of tasks of one event loop.

    Requests of concurrent tasks are batched. Cancelling a task, or leaving the loop over a stream, ends its requests
    before the next step. As an asynchronous context manager it gives thread, memory and files back at the end of the
    block. Loading blocks: construct it before the loop runs, or with ``asyncio.to_thread``.

    Args:
        model: a local folder, a hub name, or ``"builtin"``.
        given: options of the model, the KV cache and the scheduler, as those of `LLM`.

    Raises:
        ConfigError: an option that cannot work, or a model that cannot be loaded.
    """

    def __init__(self, model: str = "builtin", **given: Unpack[LLMOptions]) -> None:
        for name in ("embedding_model", "rerank_model"):
            if name in given:
                raise ConfigError(f"{name}: AsyncLLM computes no embeddings; use LLM, or headrace serve")
        options = engine_options(model, given)
        pricing = make_pricing(options.cost)
        self.loaded: Loaded = load(options)
        self._ledger = make_ledger(pricing, self.loaded.engine)
        self.tokenizer = self.loaded.tokenizer
        streams = TextStreams(self.tokenizer)
        self._make = JobMaker(self.loaded, lambda: streams)
        self._admitted = _AdmissionTimes()
        self._service = Service(self.loaded.engine, ALL_MAY_WAIT)
        self._service.watch(self._admitted, tokens=False)
        self._service.watch(self._ledger)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests and the engine's thread, and give memory and files back. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._service.close_all()
            await asyncio.sleep(0)  # the readers of these requests see their end
        if self._service.stop():
            close(self.loaded)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids), ``n`` times.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidParameter: a prompt or parameter that cannot be served; nothing has run then.
        """
        return await self._run(self._make.completions(prompts, sampling_params, n, streamed=False))

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        return await self._run(self._make.chats(messages, sampling_params, n, streamed=False))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> AsyncGenerator[CompletionDelta]:
        """As `generate`, but yields what each completion gains at every step.

        Raises:
            InvalidParameter: a prompt or parameter that cannot be served; raised by the call, before the first delta.
        """
        return self._stream(self._make.completions(prompts, sampling_params, n, streamed=True), interval=1)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> AsyncGenerator[CompletionDelta]:
        """As `chat`, but yields what each completion gains at every step."""
        return self._stream(self._make.chats(messages, sampling_params, n, streamed=True), interval=1)

    async def _run(self, job: Job) -> list[RequestOutput]:
        async for _ in self._stream(job, interval=0):
            pass
        return job.outputs

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
                        self._make.learn(job, event)
                for delta in job.deltas():
                    yield delta
        finally:
            self._service.close(answer)
            self._admitted.forget(job)

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this AsyncLLM is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._service.start()
        elif self._loop is not loop:
            raise RuntimeError("this AsyncLLM belongs to another event loop, in which it was first used")


class _AdmissionTimes:
    """A `core.ports.Watcher` that notes when open requests started to run."""

    def __init__(self) -> None:
        self._times: dict[str, float | None] = {}

    def expect(self, job: Job) -> None:
        self._times |= dict.fromkeys(job.open)

    def forget(self, job: Job) -> None:
        for request in job.requests:
            self._times.pop(request.id, None)

    def of(self, request_id: str, now: float) -> float:
        """The time of a request's admission; ``now`` where it was admitted in the step that is being delivered."""
        return self._times.get(request_id) or now

    def fold(self, event: Event, now: float) -> None:
        if (
            isinstance(event, Admitted)
            and event.request_id in self._times
            and not self._times[event.request_id]
        ):
            self._times[event.request_id] = now
