"""One call of `LLM` or `AsyncLLM`: the engine's requests, and the outputs made from the engine's events."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, cast

from headrace.compute.adapters.store import AdapterStore
from headrace.config import PARTS, ConfigError, Options, options
from headrace.core.adapters import AdapterError
from headrace.core.capacity import why_unservable
from headrace.core.constraint import UnusableConstraint
from headrace.core.events import Admitted, Emitted, Event, Finished, PromptScored
from headrace.core.ports import Grammars
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.queueing.order import TOKEN_BYTES, order_job, token_bytes
from headrace.core.request import FinishReason, InvalidParameter, Request, SamplingParams, choice_seed
from headrace.llm.images import ChatImages, Message
from headrace.llm.outputs import CompletionDelta, CompletionOutput, RequestMetrics, RequestOutput
from headrace.observe.cost.ledger import Cost
from headrace.service.images import Placed
from headrace.text.stream import TextStream, TextStreams
from headrace.text.tokenizer import TokenizerError
from headrace.wiring.model import Loaded
from headrace.wiring.plugins import by_name

# LoRA adapters of `LLM` and `AsyncLLM`, named by vLLM's `LoRARequest`.


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for prompts: its files are read once, by the first call with an equal value.

    ``lora_int_id`` (at least 1) tells adapters of one folder apart: after the files have changed, a call with another
    number reads them again.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one for each; None: the model itself."""


class LoadedAdapters:
    """The adapters that calls have named; for any number of threads."""

    def __init__(self, store: AdapterStore | None) -> None:
        self._store = store
        self._digests: dict[LoRARequest, str] = {}
        self._lock = threading.Lock()

    def digests(self, asked: AdapterChoice, prompts: int) -> list[str]:
        """The adapter of each prompt, empty for the model itself. The first call with an adapter waits for the disk.

        Raises:
            InvalidParameter: an adapter cannot be used, or there are not as many as prompts.
        """
        each = [asked] * prompts if asked is None or isinstance(asked, LoRARequest) else list(asked)
        if len(each) != prompts:
            raise InvalidParameter(
                "lora_request", f"lora_request has {len(each)} adapters for {prompts} prompts"
            )
        return ["" if one is None else self._digest(one) for one in each]

    def _digest(self, asked: LoRARequest) -> str:
        if self._store is None:
            raise InvalidParameter("lora_request", "lora_request needs an engine with enable_lora=True")
        if not isinstance(asked, LoRARequest) or asked.lora_int_id < 1:
            raise InvalidParameter(
                "lora_request", f"lora_request must be a LoRARequest with a number from 1, got {asked!r}"
            )
        with self._lock:
            if asked not in self._digests:
                try:
                    self._digests[asked] = self._store.add(Path(asked.lora_path).expanduser())
                except AdapterError as error:
                    raise InvalidParameter(
                        "lora_request", f"lora_request {asked.lora_name}: {error}"
                    ) from None
            return self._digests[asked]


class PendingAnswer:
    """The completion of one request, which is written into its `RequestOutput` as it grows.

    Text is made at every step if it is ``streamed`` or if there are stop strings, otherwise at the end.
    ``continues``: the completion continues the prompt's text instead of beginning a new one.
    """

    def __init__(
        self,
        request: Request,
        output: RequestOutput,
        place: tuple[int, int],
        streams: TextStreams,
        grammars: Grammars,
        *,
        continues: bool,
        streamed: bool,
    ) -> None:
        params = request.params
        self.request = request
        self.output = output
        self._grammars = grammars
        self._prompt_index, self._index = place
        self._first = self._index == 0
        self._answer = output.outputs[self._index]
        self._watch = streamed or bool(params.stop)
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
        self._shown_text = 0  # characters (and below, tokens and logprobs) in earlier deltas
        self._shown_tokens = 0
        self._shown_logprobs = 0

    def emit(self, event: Emitted, now: float) -> bool:
        """Add tokens; return whether a stop string has just ended the completion."""
        answer = self._answer
        if answer.stop_reason is not None:
            return False  # sampled before the engine knew of the stop string
        used = len(event.tokens)
        if self._watch:
            delta = self._stream.push(self._visible(list(event.tokens)))
            answer.text += delta.text
            answer.stop_reason = delta.stopped
            if delta.stopped is not None:  # later tokens of the same step are not part of the completion
                used = len(delta.texts)
        answer.token_ids += event.tokens[:used]
        answer.logprobs += event.logprobs[:used]
        if self._first:
            self.output.metrics.token_times += [now] * used
        return answer.stop_reason is not None

    def score(self, event: PromptScored) -> None:
        """Add log-probabilities of the prompt."""
        self.output.prompt_logprobs += event.logprobs if self._first else ()

    def admit(self, cached_tokens: int, now: float) -> None:
        """Record that the request has started to run for the first time."""
        metrics = self.output.metrics
        if self._first and not metrics.admitted:
            metrics.admitted = now
            metrics.cached_tokens = cached_tokens

    def finish(self, event: Finished, now: float) -> None:
        """Close the completion."""
        answer = self._answer
        if event.reason in (FinishReason.REJECTED, FinishReason.FAILED, FinishReason.TIMEOUT):
            answer.error = event.message or str(event.reason)
        stopped_by_string = answer.stop_reason is not None
        answer.finish_reason = str(FinishReason.STOP if stopped_by_string else event.reason)
        if not stopped_by_string:
            if not self._watch:
                answer.text = self._stream.push(self._visible(answer.token_ids)).text
            answer.text += self._stream.finish().text
            if event.stop_token in self._params.stop_token_ids:
                answer.stop_reason = event.stop_token
        constraint = self._params.structured_outputs
        if (
            constraint is not None and answer.stop_reason is not None
        ):  # ended by the request's own stop string or token
            whole = self._grammars.is_complete(constraint, answer.text)
            answer.finish_reason = str(FinishReason.STOP if whole else FinishReason.LENGTH)
        if self._first:
            self.output.metrics.finished = now

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the completion so far."""
        return len(self._answer.token_ids)

    def delta(self) -> CompletionDelta:
        """The delta since the last call."""
        answer = self._answer
        delta = CompletionDelta(
            self._prompt_index,
            self._index,
            answer.text[self._shown_text :],
            tuple(answer.token_ids[self._shown_tokens :]),
            tuple(answer.logprobs[self._shown_logprobs :]),
            answer.finish_reason,
            self.output,
        )
        self._shown_text = len(answer.text)
        self._shown_tokens = len(answer.token_ids)
        self._shown_logprobs = len(answer.logprobs)
        return delta

    def _visible(self, tokens: list[int]) -> list[int]:
        """The tokens without a final stop token, unless ``include_stop_str_in_output`` is set."""
        hidden = tokens[-1:] and tokens[-1] in self._ends
        return tokens[:-1] if hidden and not self._params.include_stop_str_in_output else tokens


Prompt = str | Sequence[int]
"""Text, or token ids."""


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

    def __init__(self, loaded: Loaded, images: ChatImages, streams: Callable[[], TextStreams]) -> None:
        self._loaded = loaded
        self._images = images
        self.adapters = LoadedAdapters(loaded.adapters)
        self._streams = streams
        self._lengths = LengthPredictor(loaded.ledger.max_model_len)
        self._number = 0
        self._lock = threading.Lock()  # of the two above

    def completions(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        n: int,
        adapters: AdapterChoice = None,
        *,
        streamed: bool,
    ) -> Job:
        """A job that continues prompts.

        Raises:
            InvalidParameter: a prompt or parameter is invalid.
        """
        given = each_prompt(prompts)
        placed = [Placed(self._tokens(prompt, f"prompts[{at}]"), ()) for at, prompt in enumerate(given)]
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._make(texts, placed, params, n, adapters, continues=True, streamed=streamed)

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params,
        n: int,
        adapters: AdapterChoice = None,
        *,
        streamed: bool,
    ) -> Job:
        """A job that answers conversations, rendered by the model's chat template.

        Raises:
            InvalidParameter: a conversation, an image or a parameter is invalid.
        """
        texts, placed = list[str](), list[Placed]()
        chats = [self._images.separated(*chat) for chat in _conversations(messages)]
        for chat, images in chats:
            prompt = self._loaded.template.render(chat, images=bool(images))
            tokens = self._loaded.tokenizer.encode_prompt(prompt)
            texts.append(prompt.text)
            placed.append(self._images.place(tokens, images) if images else Placed(tuple(tokens), ()))
        return self._make(texts, placed, params, n, adapters, continues=False, streamed=streamed)

    def learn(self, job: Job, event: Finished) -> None:
        """Record the length of a request's output, for the order of later jobs."""
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            with self._lock:
                self._lengths.observe(job.request(event.request_id), event.output_tokens)

    def _make(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[Placed],
        params: Params,
        n: int,
        adapters: AdapterChoice,
        *,
        continues: bool,
        streamed: bool,
    ) -> Job:
        if integer(n, "n") < 1:
            raise InvalidParameter("n", f"n must be at least 1, got {n}")
        each = _each_params(params, len(prompts), self._loaded.defaults.params)
        digests = self.adapters.digests(adapters, len(prompts))
        now = time.monotonic()
        outputs: list[RequestOutput] = []
        answers: dict[str, PendingAnswer] = {}
        for at, (text, prompt, one, adapter) in enumerate(zip(texts, prompts, each, digests, strict=True)):
            with self._lock:
                first = self._number + 1
                self._number += n  # one number per completion, so that no two share a seed
            name = f"offline-{first}"
            completions = [CompletionOutput(i) for i in range(n)]
            outputs.append(RequestOutput(name, text, [*prompt.tokens], completions, RequestMetrics(now)))
            seed = self._loaded.seed + first if one.seed is None else one.seed
            later = replace(one, prompt_logprobs=None)  # only the first completion scores the prompt
            for i in range(n):
                params_of = later if i else one
                request = self._request(f"{name}-{i}", prompt, params_of, choice_seed(seed, i), now, adapter)
                self._check(request, at, text is not None)
                answers[request.id] = PendingAnswer(
                    request,
                    outputs[-1],
                    (at, i),
                    self._streams(),
                    self._loaded.grammars,
                    continues=continues,
                    streamed=streamed,
                )
        return Job(outputs, {name: answers[name] for name in self._ordered(answers)}, streamed)

    def _request(
        self, name: str, prompt: Placed, params: SamplingParams, seed: int, now: float, adapter: str
    ) -> Request:
        return Request(
            id=name,
            tokens=prompt.tokens,
            params=params,
            arrived=now,
            adapter=adapter,
            seed=seed,
            eos_token_ids=self._loaded.tokenizer.eos_token_ids,
            images=prompt.images,
        )

    def _tokens(self, prompt: Prompt, param: str) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        try:
            return tuple(self._loaded.tokenizer.encode(prompt))
        except TokenizerError as error:
            raise InvalidParameter("prompts", f"{param}: {error}") from None

    def _check(self, request: Request, at: int, of_text: bool) -> None:
        """Refuse an invalid request before any request of the call runs; ``of_text``: its prompt was not token ids."""
        constraint = request.params.structured_outputs
        if constraint is not None:
            try:
                self._loaded.grammars.check(constraint)
            except UnusableConstraint as error:
                raise InvalidParameter("structured_outputs", f"structured_outputs: {error}") from None
        vocab_size, params = self._loaded.shape.vocab_size, request.params
        if request.images and params.prompt_logprobs is not None:
            raise InvalidParameter(
                "prompt_logprobs", "prompt_logprobs is not supported for a prompt with images"
            )
        why = self._loaded.tokenizer.why_unreadable(request.tokens, vocab_size) if of_text else None
        if why is not None:
            raise InvalidParameter("prompts", f"prompts[{at}]: {why}")
        for param, shown, tokens in (
            ("prompts", f"prompts[{at}]", request.tokens),
            ("stop_token_ids", "stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", "allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", "logit_bias", [token for token, _ in params.logit_bias]),
            ("bad_words", "bad_words", [token for word in params.bad_words for token in word]),
        ):
            wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise InvalidParameter(
                    param, f"{shown} has the token id {wrong}; ids are 0 to {vocab_size - 1}"
                )
        ledger = self._loaded.ledger
        sizes = ledger.max_model_len, ledger.num_blocks, ledger.block_size, ledger.windows
        problem = why_unservable(request, *sizes)
        if problem:
            raise InvalidParameter("prompts", f"prompts[{at}]: {problem}")

    def _ordered(self, answers: Mapping[str, PendingAnswer]) -> list[str]:
        """The ids in the order in which the requests run: those with a common prefix together."""
        requests = [each.request for each in answers.values()]
        prompts = [token_bytes(request.tokens) for request in requests]
        with self._lock:
            outputs = [self._lengths.expected(request) for request in requests]
        grain = TOKEN_BYTES * self._loaded.ledger.block_size
        return [requests[at].id for at in order_job(prompts, outputs, grain)]


def each_prompt(prompts: Prompt | Sequence[Prompt], param: str = "prompts") -> list[Prompt]:
    """One prompt, or several, as a list; a list of numbers is one prompt of token ids.

    Raises:
        InvalidParameter: a value has another type.
    """
    if isinstance(prompts, str):
        return [prompts]
    given = items(prompts, param, "text, a list of token ids, or a list of these")
    if given and _is_id(given[0]):
        return [_ids(given, param)]
    return [_prompt(each, f"{param}[{at}]") for at, each in enumerate(given)]


def integer(value: object, param: str) -> int:
    """``value`` if it is an integer, NumPy's included.

    Raises:
        InvalidParameter: it has another type.
    """
    if not _is_id(value):
        raise InvalidParameter(param, f"{param} must be an integer, got {value!r:.80}")
    return index(cast(SupportsIndex, value))


def _prompt(given: object, param: str) -> Prompt:
    if isinstance(given, str):
        return given
    return _ids(items(given, param, "text or a list of token ids"), param)


def items(values: object, param: str, shown: str) -> list[Any]:
    """The items of a list, or of another iterable that is neither bytes, a mapping nor a set.

    Raises:
        InvalidParameter: it is none; ``shown`` says what is expected.
    """
    if not isinstance(values, bytes | bytearray | Mapping | Set):
        try:
            return list(cast(Iterable[Any], values))
        except TypeError:
            pass
    raise InvalidParameter(param, f"{param} must be {shown}, got {type(values).__name__}")


def _ids(values: list[Any], param: str) -> list[int]:
    if all(type(value) is int for value in values):
        return values
    return [integer(value, f"{param}[{place}]") for place, value in enumerate(values)]


def _is_id(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        index(cast(SupportsIndex, value))
    except TypeError:
        return False
    return True


def _each_params(params: Params, number: int, default: SamplingParams) -> list[SamplingParams]:
    """The sampling parameters of each of ``number`` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * number
    each = items(params, "sampling_params", "SamplingParams or a list of them")
    for place, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            raise InvalidParameter(
                "sampling_params",
                f"sampling_params[{place}] must be SamplingParams, got {type(one).__name__}",
            )
    if len(each) != number:
        raise InvalidParameter("sampling_params", f"{len(each)} sampling_params for {number} prompts")
    return each


def _conversations(messages: object) -> list[tuple[list[Message], str]]:
    """One conversation, or several, as a list; each with its name in errors."""
    shown = "a list of {'role': …, 'content': …}"
    if isinstance(messages, str):
        raise InvalidParameter("messages", f"messages must be {shown}, got str")
    given = items(messages, "messages", f"{shown}, or a list of such lists")
    single = bool(given) and isinstance(given[0], Mapping)
    chats = [given] if single else [items(each, f"messages[{at}]", shown) for at, each in enumerate(given)]
    named = []
    for at, chat in enumerate(chats):
        place = "messages" if single else f"messages[{at}]"
        named.append((chat, place))
        if not chat:
            raise InvalidParameter("messages", f"{place} is empty")
        for number, message in enumerate(chat):
            _check_message(message, f"{place}[{number}]")
    return named


def _check_message(message: object, place: str) -> None:
    if not isinstance(message, Mapping):
        shown = "an object with role and content"
        raise InvalidParameter("messages", f"{place} must be {shown}, got {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise InvalidParameter("messages", f"{place}.role must be a string, got {message.get('role')!r:.80}")
    content = message.get("content")
    if not isinstance(content, str | list | tuple | None):
        raise InvalidParameter(
            "messages", f"{place}.content must be a string or a list of parts, got {type(content).__name__}"
        )


ENGINE_PARTS = ("model", "cache", "scheduler", "cost", "adapters", "images", "embedding")
"""The parts of the configuration that apply without a server."""


def engine_options(model: str, given: Mapping[str, Any]) -> Options:
    """All options, with those that are ``given``.

    Raises:
        ConfigError: an option is unknown or the server's, or a value is invalid.
    """
    server = {each.name for part, kind in PARTS.items() if part not in ENGINE_PARTS for each in fields(kind)}
    for name in given:
        if name in server:
            raise ConfigError(f"{name} is an option of headrace serve; an engine without a server has none")
    named = by_name(given)
    if isinstance(limit := named.get("limit_mm_per_prompt"), Mapping):
        named["limit_mm_per_prompt"] = json.dumps(dict(limit), default=repr)
    return options({"model": model, **named}, keywords=True)
