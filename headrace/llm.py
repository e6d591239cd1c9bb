"""Offline inference: the engine of the server without sockets.

```
from headrace import LLM, SamplingParams
llm = LLM("builtin")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
    print(output.outputs[0].text)
```
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, cast

from headrace.build.model import Loaded, close, load
from headrace.config import options
from headrace.core.capacity import why_never
from headrace.core.constraint import UnusableConstraint
from headrace.core.events import Admitted, Emitted, Event, Finished, PromptScored
from headrace.core.plan import TokenLogprob
from headrace.core.ports import Grammars
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.queueing.job_order import TOKEN_BYTES, order_job, token_bytes
from headrace.core.request import FinishReason, InvalidParameter, Request, SamplingParams
from headrace.serve.text.stream import TextStream, TextStreams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    ``finish_reason`` is ``stop``, ``length``, or ``failed`` with the reason in ``error``. ``stop_reason`` is the
    stop string or stop token id that ended it, None for an end token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of the monotonic clock. ``token_times`` are those of the first answer."""

    arrived: float
    admitted: float = 0.0
    finished: float = 0.0
    cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.token_times[0] if self.token_times else self.finished


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers; ``prompt_logprobs`` score its tokens from the second on."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class LLM:
    """A model and its engine in this process.

    Args:
        model: a local folder, a hub name, or ``"builtin"``.
        given: any option of the command line, spelt with underscores (``max_num_seqs=8``).

    Raises:
        ConfigError: an option that cannot work, or a model that cannot be loaded.
    """

    def __init__(self, model: str = "builtin", **given: Any) -> None:
        self.loaded: Loaded = load(options({"model": model, **given}))
        self.tokenizer = self.loaded.tokenizer
        self._streams = TextStreams(self.tokenizer)
        self._lengths = LengthPredictor(self.loaded.ledger.max_model_len)
        self._number = 0
        self._closed = False

    def close(self) -> None:
        """Give threads and files back; with ``kv_offload_path`` the cache is left there for the next run.

        Once is enough, and a second time does nothing.
        """
        if not self._closed:
            self._closed = True
            close(self.loaded)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids), ``n`` times.

        They run in the order in which they are best computed: prompts with a common prefix together.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidParameter: a prompt or parameter that cannot be served; nothing has run then.
            KeyboardInterrupt: Ctrl-C, after the step that it met. All that was asked has ended then, as after any other
                error of a step, and the next call begins anew.
        """
        given = _each(prompts)
        tokens = [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in given
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._run(texts, tokens, sampling_params, n, progress, continues=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        if isinstance(messages, str):
            raise InvalidParameter(
                "messages", "messages must be a list of {'role': …, 'content': …}, got a string"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.loaded.template.render(list(chat)) for chat in conversations]  # type: ignore[arg-type]
        tokens = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._run(texts, tokens, sampling_params, n, progress, continues=False)

    def _run(
        self,
        texts: Sequence[str | None],
        tokens: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        progress: bool,
        *,
        continues: bool,
    ) -> list[RequestOutput]:
        """``continues`` says that answers go on with their prompts' text instead of beginning a new one."""
        if n < 1:
            raise InvalidParameter("n", f"n must be at least 1, got {n}")
        each = (
            [params or SamplingParams()] * len(tokens) if not isinstance(params, Sequence) else list(params)
        )
        if len(each) != len(tokens):
            raise InvalidParameter(
                "sampling_params", f"{len(each)} sampling_params for {len(tokens)} prompts"
            )
        now = time.monotonic()
        requests: list[Request] = []
        outputs: list[RequestOutput] = []
        for text, ids, one in zip(texts, tokens, each, strict=True):
            first = self._number + 1
            self._number += n  # one for each answer, so that no two share a seed
            name = f"offline-{first}"
            outputs.append(
                RequestOutput(name, text, ids, [CompletionOutput(i) for i in range(n)], RequestMetrics(now))
            )
            seed = self.loaded.seed + first if one.seed is None else one.seed
            later = replace(one, prompt_logprobs=None)  # the first one's scores of the prompt serve all
            requests += [
                self._request(f"{name}-{i}", ids, later if i else one, seed + i, now) for i in range(n)
            ]
            self._check(requests[-1], len(outputs) - 1)
        pending = {
            request.id: _Pending(
                request, outputs[i // n], i % n, self._streams, continues, self.loaded.grammars
            )
            for i, request in enumerate(requests)
        }
        self._drive(requests, pending, progress)
        return outputs

    def _request(self, name: str, ids: list[int], params: SamplingParams, seed: int, now: float) -> Request:
        return Request(
            id=name,
            tokens=tuple(ids),
            params=params,
            arrived=now,
            seed=seed,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )

    def _check(self, request: Request, index: int) -> None:
        """Refuse a prompt before any work is done, so that it costs the others nothing."""
        constraint = request.params.structured_outputs
        if constraint is not None:
            try:
                self.loaded.grammars.check(constraint)
            except UnusableConstraint as error:
                raise InvalidParameter("structured_outputs", f"structured_outputs: {error}") from None
        vocab_size = self.loaded.spec.vocab_size
        wrong = next((token for token in request.tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidParameter(
                "prompts", f"prompts[{index}] has the token id {wrong}; ids are 0 to {vocab_size - 1}"
            )
        ledger = self.loaded.ledger
        problem = why_never(request, ledger.max_model_len, ledger.num_blocks, ledger.block_size)
        if problem:
            raise InvalidParameter("prompts", f"prompts[{index}]: {problem}")

    def _drive(self, requests: Sequence[Request], pending: dict[str, _Pending], progress: bool) -> None:
        engine = self.loaded.engine
        open_ids = set(pending)
        with _interrupts_between_steps() as heed_interrupt:
            try:
                for request in self._in_job_order(requests):
                    engine.submit(request, request.arrived)
                with _progress_bar(len(requests), progress) as advance:
                    while open_ids:
                        now = time.monotonic()
                        due = engine.wake_at(now)
                        if due is not None and due > now:
                            time.sleep(due - now)
                        for event in engine.step(time.monotonic()):
                            self._take(event, pending, open_ids, advance)
                        heed_interrupt()
            finally:  # neither an interrupt nor a failed step leaves requests behind in an engine that lives on
                for request_id in open_ids:
                    engine.cancel(request_id, FinishReason.CANCELLED, time.monotonic())

    def _in_job_order(self, requests: Sequence[Request]) -> list[Request]:
        prompts = [token_bytes(request.tokens) for request in requests]
        outputs = [self._lengths.expected(request) for request in requests]
        grain = TOKEN_BYTES * self.loaded.ledger.block_size
        return [requests[index] for index in order_job(prompts, outputs, grain)]

    def _take(
        self, event: Event, pending: dict[str, _Pending], open_ids: set[str], advance: Callable[[int], None]
    ) -> None:
        now = time.monotonic()
        if isinstance(event, Emitted):
            owner = pending.get(event.request_id)
            if owner is not None and owner.emit(event, now):
                self.loaded.engine.cancel(event.request_id, FinishReason.STOP, now)
        elif isinstance(event, Finished) and event.request_id in open_ids:
            open_ids.discard(event.request_id)
            if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._lengths.observe(pending[event.request_id].request, event.output_tokens)
            tokens = pending[event.request_id].finish(event, now)
            advance(tokens)
        elif isinstance(event, Admitted | PromptScored) and event.request_id in pending:
            pending[event.request_id].note(event, now)


class _Pending:
    """One answer on its way: gathers tokens, and text where a stop string must be watched for."""

    def __init__(
        self,
        request: Request,
        output: RequestOutput,
        index: int,
        streams: TextStreams,
        continues: bool,
        grammars: Grammars,
    ) -> None:
        self._grammars = grammars
        params = request.params
        self.request = request
        self._first = index == 0
        self._output = output
        self._answer = output.outputs[index]
        self._watch = bool(params.stop)
        self._params = params
        ends = frozenset[int]() if params.ignore_eos else request.eos_token_ids
        self._ends = ends.union(params.stop_token_ids)
        self._stream: TextStream = streams.open(
            prompt=request.tokens if continues else (),
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def emit(self, event: Emitted, now: float) -> bool:
        """Take tokens; whether a stop string has just ended the answer."""
        answer = self._answer
        if answer.stop_reason is not None:
            return False  # drawn before the engine heard of the stop string
        answer.token_ids += event.tokens
        answer.logprobs += event.logprobs
        if self._first:
            self._output.metrics.token_times += [now] * len(event.tokens)
        if self._watch:
            delta = self._stream.push(self._shown(list(event.tokens)))
            answer.text += delta.text
            answer.stop_reason = delta.stopped
        return answer.stop_reason is not None

    def _shown(self, tokens: list[int]) -> list[int]:
        """Without a token at the end that ended the answer, unless it was asked for."""
        hidden = tokens[-1:] and tokens[-1] in self._ends
        return tokens[:-1] if hidden and not self._params.include_stop_str_in_output else tokens

    def note(self, event: Admitted | PromptScored, now: float) -> None:
        if isinstance(event, PromptScored):
            self._output.prompt_logprobs += event.logprobs if self._first else ()
        elif self._first and not self._output.metrics.admitted:
            self._output.metrics.admitted = now
            self._output.metrics.cached_tokens = event.cached_tokens

    def finish(self, event: Finished, now: float) -> int:
        """Close the answer; how many tokens it has."""
        answer = self._answer
        if event.reason in (FinishReason.REJECTED, FinishReason.FAILED, FinishReason.TIMEOUT):
            answer.error = event.message or str(event.reason)
        stopped_by_string = answer.stop_reason is not None
        answer.finish_reason = str(FinishReason.STOP if stopped_by_string else event.reason)
        if not stopped_by_string:
            if not self._watch:
                answer.text = self._stream.push(self._shown(answer.token_ids)).text
            answer.text += self._stream.finish().text
            if event.stop_token in self._params.stop_token_ids:
                answer.stop_reason = event.stop_token
        constraint = self._params.structured_outputs
        if constraint is not None and answer.stop_reason is not None:  # the caller's own stop cut it off
            whole = self._grammars.is_complete(constraint, answer.text)
            answer.finish_reason = str(FinishReason.STOP if whole else FinishReason.LENGTH)
        if self._first:
            self._output.metrics.finished = now
        return len(answer.token_ids)


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Keep Ctrl-C until what is yielded is called: amid a step it would leave a plan half made or half run.

    A second one is heard at once, should a step hang. Only what Python itself would raise is kept, which it raises
    in the main thread alone.
    """
    theirs = threading.current_thread() is not threading.main_thread()
    if theirs or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    kept = False

    def keep(number: int, frame: FrameType | None) -> None:
        nonlocal kept
        if kept:
            signal.default_int_handler(number, frame)
        kept = True

    def heed() -> None:
        if kept:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, keep)
    try:
        yield heed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """What to call with each finished request's number of tokens."""
    if not shown:
        yield lambda tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), transient=True) as bar:
        task = bar.add_task("generating", total=total, speed="")
        began = time.monotonic()
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            speed = done / max(time.monotonic() - began, 1e-9)
            bar.update(task, advance=1, speed=f"{speed:.0f} tok/s")

        yield advance


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list; a list of numbers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
