"""One call of `LLM` or `AsyncLLM`: the engine's requests, and the outputs made from the engine's events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from headrace.build.model import Loaded
from headrace.core.capacity import why_unservable
from headrace.core.constraint import UnusableConstraint
from headrace.core.events import Admitted, Emitted, Event, Finished, PromptScored
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.queueing.job_order import TOKEN_BYTES, order_job, token_bytes
from headrace.core.request import FinishReason, InvalidParameter, Request, SamplingParams, choice_seed
from headrace.llm.answer import PendingAnswer
from headrace.llm.outputs import CompletionDelta, CompletionOutput, RequestMetrics, RequestOutput
from headrace.observe.cost.account import Cost
from headrace.serve.text.stream import TextStreams

Prompt = str | Sequence[int]
"""Text, or token ids."""

Message = Mapping[str, Any]
"""A message of a conversation: ``{"role": ..., "content": ...}``."""

Params = SamplingParams | Sequence[SamplingParams] | None
"""Sampling parameters of all prompts, or one for each."""


class Job:
    """The requests of one call, ordered so that common prefixes are shared, and the outputs of its prompts.

    One thread may apply events while the thread of the call reads: a request leaves ``open`` only when its outputs are
    complete and its news can be read.
    """

    def __init__(
        self, outputs: list[RequestOutput], answers: Mapping[str, PendingAnswer], streamed: bool
    ) -> None:
        self.outputs = outputs
        self.requests = [each.request for each in answers.values()]
        self.open = set(answers)
        self._answers = answers
        self._streamed = streamed
        self._deltas: deque[CompletionDelta] = deque()
        self._ended: deque[Finished] = deque()

    def take(self, event: Event, now: float) -> bool:
        """Apply an event of one of the requests; return whether a stop string has just ended its completion."""
        if isinstance(event, Emitted):
            answer = self._answers[event.request_id]
            stopped = answer.emit(event, now)
            if self._streamed and not stopped and event.request_id in self.open:
                self._deltas.append(answer.delta())
            return stopped
        if isinstance(event, Finished) and event.request_id in self.open:
            answer = self._answers[event.request_id]
            answer.finish(event, now)
            if self._streamed:
                self._deltas.append(answer.delta())
            self._ended.append(event)
            self.open.discard(event.request_id)
        elif isinstance(event, PromptScored):
            self._answers[event.request_id].score(event)
        elif isinstance(event, Admitted):
            self.admit(event.request_id, event.cached_tokens, now)
        return False

    def admit(self, request_id: str, cached_tokens: int, now: float) -> None:
        """Record that a request has started to run."""
        self._answers[request_id].admit(cached_tokens, now)

    def charge(self, request_id: str, cost: Cost) -> None:
        """Add the cost of a request that has ended."""
        metrics = self._answers[request_id].output.metrics
        metrics.device_seconds += cost.device_seconds
        metrics.cost += cost.total

    def request(self, request_id: str) -> Request:
        """The request with this id."""
        return self._answers[request_id].request

    def num_tokens(self, request_id: str) -> int:
        """Tokens of a request's completion so far."""
        return self._answers[request_id].num_tokens

    def has_news(self) -> bool:
        """Whether there are deltas, or ends of requests, that were not read yet."""
        return bool(self._deltas or self._ended)

    def ended(self) -> Iterator[Finished]:
        """The ends of requests since the last call, in order."""
        while self._ended:
            yield self._ended.popleft()

    def deltas(self) -> Iterator[CompletionDelta]:
        """The deltas since the last call, in order."""
        while self._deltas:
            yield self._deltas.popleft()


class JobMaker:
    """Makes jobs for one model: tokenizes, checks, numbers and orders their requests. For any number of threads."""

    def __init__(self, loaded: Loaded, streams: Callable[[], TextStreams]) -> None:
        self._loaded = loaded
        self._streams = streams
        self._lengths = LengthPredictor(loaded.ledger.max_model_len)
        self._number = 0
        self._lock = threading.Lock()  # of the two above

    def completions(
        self, prompts: Prompt | Sequence[Prompt], params: Params, n: int, *, streamed: bool
    ) -> Job:
        """A job that continues prompts.

        Raises:
            InvalidParameter: a prompt or parameter is invalid.
        """
        given = each_prompt(prompts)
        encode = self._loaded.tokenizer.encode
        tokens = [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in given]
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._make(texts, tokens, params, n, continues=True, streamed=streamed)

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params,
        n: int,
        *,
        streamed: bool,
    ) -> Job:
        """A job that answers conversations, rendered by the model's chat template.

        Raises:
            InvalidParameter: a conversation or parameter is invalid.
        """
        if isinstance(messages, str):
            raise InvalidParameter(
                "messages", "messages must be a list of {'role': …, 'content': …}, got a string"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._loaded.template.render(list(chat)) for chat in conversations]  # type: ignore[arg-type]
        tokens = [self._loaded.tokenizer.encode_prompt(prompt) for prompt in prompts]
        texts = [prompt.text for prompt in prompts]
        return self._make(texts, tokens, params, n, continues=False, streamed=streamed)

    def learn(self, job: Job, event: Finished) -> None:
        """Record the length of a request's output, for the order of later jobs."""
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            with self._lock:
                self._lengths.observe(job.request(event.request_id), event.output_tokens)

    def _make(
        self,
        texts: Sequence[str | None],
        tokens: Sequence[list[int]],
        params: Params,
        n: int,
        *,
        continues: bool,
        streamed: bool,
    ) -> Job:
        if n < 1:
            raise InvalidParameter("n", f"n must be at least 1, got {n}")
        each = (
            list(params)
            if isinstance(params, Sequence)
            else [params or self._loaded.defaults.params] * len(tokens)
        )
        if len(each) != len(tokens):
            raise InvalidParameter(
                "sampling_params", f"{len(each)} sampling_params for {len(tokens)} prompts"
            )
        now = time.monotonic()
        outputs: list[RequestOutput] = []
        answers: dict[str, PendingAnswer] = {}
        for index, (text, ids, one) in enumerate(zip(texts, tokens, each, strict=True)):
            with self._lock:
                first = self._number + 1
                self._number += n  # one number per completion, so that no two share a seed
            name = f"offline-{first}"
            completions = [CompletionOutput(i) for i in range(n)]
            outputs.append(RequestOutput(name, text, ids, completions, RequestMetrics(now)))
            seed = self._loaded.seed + first if one.seed is None else one.seed
            later = replace(one, prompt_logprobs=None)  # only the first completion scores the prompt
            for i in range(n):
                request = self._request(f"{name}-{i}", ids, later if i else one, choice_seed(seed, i), now)
                self._check(request, index)
                answers[request.id] = PendingAnswer(
                    request,
                    outputs[-1],
                    (index, i),
                    self._streams(),
                    self._loaded.grammars,
                    continues=continues,
                    streamed=streamed,
                )
        return Job(outputs, {name: answers[name] for name in self._ordered(answers)}, streamed)

    def _request(self, name: str, ids: list[int], params: SamplingParams, seed: int, now: float) -> Request:
        return Request(
            id=name,
            tokens=tuple(ids),
            params=params,
            arrived=now,
            seed=seed,
            eos_token_ids=self._loaded.tokenizer.eos_token_ids,
        )

    def _check(self, request: Request, index: int) -> None:
        """Refuse an invalid request before any request of the call runs."""
        constraint = request.params.structured_outputs
        if constraint is not None:
            try:
                self._loaded.grammars.check(constraint)
            except UnusableConstraint as error:
                raise InvalidParameter("structured_outputs", f"structured_outputs: {error}") from None
        vocab_size = self._loaded.shape.vocab_size
        wrong = next((token for token in request.tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidParameter(
                "prompts", f"prompts[{index}] has the token id {wrong}; ids are 0 to {vocab_size - 1}"
            )
        ledger = self._loaded.ledger
        problem = why_unservable(request, ledger.max_model_len, ledger.num_blocks, ledger.block_size)
        if problem:
            raise InvalidParameter("prompts", f"prompts[{index}]: {problem}")

    def _ordered(self, answers: Mapping[str, PendingAnswer]) -> list[str]:
        """The ids in the order in which the requests run: those with a common prefix together."""
        requests = [each.request for each in answers.values()]
        prompts = [token_bytes(request.tokens) for request in requests]
        with self._lock:
            outputs = [self._lengths.expected(request) for request in requests]
        grain = TOKEN_BYTES * self._loaded.ledger.block_size
        return [requests[index].id for index in order_job(prompts, outputs, grain)]


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list; a list of numbers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
