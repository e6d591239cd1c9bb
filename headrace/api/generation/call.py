"""One API call in progress: its prompts, its sequences in the engine, and the choices that they become.

It is the same for all dialects, streamed or not. Their writers (for example `ChatWriter`) turn it into JSON.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace.api.auth.api_keys import tenant
from headrace.api.cache.cacheable import unknown_field
from headrace.api.cache.wire import control
from headrace.api.errors import aborted, invalid, not_cached, of_finish, turned_away
from headrace.api.generation.caller import COST_HEADER, Caller
from headrace.api.generation.choices import Choice
from headrace.api.generation.fields import Generation
from headrace.api.generation.kv_fields import retained
from headrace.api.generation.scheduling_fields import Scheduling, retentions, scheduling_of
from headrace.api.generation.usage import usage
from headrace.api.model import ServedModel
from headrace.api.prompts.policy import UNKNOWN, About, SessionOf, session_of, session_of_stored
from headrace.api.rate_limit_headers import rate_headers
from headrace.core.events import Emitted, Finished, PromptScored
from headrace.core.plan import TokenLogprob
from headrace.core.request import SEED_BITS, FinishReason, Request, Retention, SamplingParams, choice_seed
from headrace.response_cache.lookup import NotCached
from headrace.response_cache.query import LookupRequest, Turn, no_turn
from headrace.service.answer import Answer
from headrace.service.intake import Pieces
from headrace.service.service import Refused
from headrace.text.first_call import FirstCallStream
from headrace.text.parsing.message import Reading
from headrace.text.stream import Texts

logger = logging.getLogger(__name__)


class Answers(Protocol):
    """What answers calls: `response_cache.lookup.CacheLookup`, or `BackgroundRequests`, which only fills the caches."""

    def now(self) -> float: ...

    async def open(self, questions: Sequence[LookupRequest], interval: int = 1) -> Answer: ...

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None: ...

    def stop_sequence(self, answer: Answer, index: int) -> None: ...


class Prompt(NamedTuple):
    """A prompt, which one or several choices answer.

    ``continues``: the output continues the prompt's text, so the leading space of its first word counts. ``mute``: only
    the prompt's log-probabilities are wanted. ``echo``: the prompt's text, if it is returned before the output.
    ``retention``: parts of the computed prompt that are retained longer. ``prediction``: the output that the client
    expects. ``reading``: how reasoning and tool calls are parsed (None: plain text). ``about``: for its explanation.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    continues: bool
    mute: bool = False
    echo: str = ""
    retention: tuple[Retention, ...] = ()
    reading: Reading | None = None
    prediction: tuple[int, ...] = ()
    about: About = UNKNOWN

    @property
    def call_format(self) -> str:
        """The format of the tool call that ends the output if only one call is allowed; otherwise empty."""
        reading = self.reading
        return "" if reading is None or reading.tools is None or reading.parallel else reading.tools.name

    @property
    def ends_by_text(self) -> bool:
        """Whether text, such as a stop string, can end the output."""
        return bool(self.params.stop or self.call_format)


class Call:
    """Made by `open_call`; `advance` it until `done`, then `close` it, whatever happens.

    ``seconds`` is the time limit that a timeout error reports.
    """

    def __init__(
        self,
        id: str,
        model: ServedModel,
        prompts: Sequence[Prompt],
        choices: Sequence[Choice],
        recall: Answers,
        answer: Answer,
        seconds: float,
        stream: bool = False,
        shows_cost: bool = False,
    ) -> None:
        self.id = id
        self.stream = stream
        self.shows_cost = shows_cost
        self.created = int(time.time())
        self.model = model
        self.prompts = tuple(prompts)
        self.choices = tuple(choices)
        self.choices_per_prompt = len(self.choices) // len(self.prompts)
        self.prompt_scores: list[dict[int, TokenLogprob]] = [{} for _ in prompts]
        self._recall = recall
        self._answer = answer
        self._seconds = seconds
        self._aborted = False

    @property
    def cache_note(self) -> str:
        """The value of the header `X-Headrace-Cache`; empty without response caches."""
        return self._answer.note

    @property
    def prompt_headers(self) -> tuple[tuple[str, str], ...]:
        """Response headers that say what was done to the prompt."""
        return self.prompts[0].about.headers

    @property
    def first_token_at(self) -> float | None:
        """When the first token arrived, on the monotonic clock; None before."""
        return self._answer.first_token_at

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of the choices that have ended."""
        return [choice.finish_reason for choice in self.choices if choice.finish_reason is not None]

    @property
    def tenant(self) -> str:
        """The tenant that the call is accounted to."""
        return self.choices[0].request.tenant

    @property
    def service_class(self) -> str:
        """The service class that it runs in."""
        return self.choices[0].request.service_class

    @property
    def settled(self) -> bool:
        """Whether every event of the call has arrived, read or not."""
        return self._answer.settled

    @property
    def done(self) -> bool:
        """Whether every event of the call has been read."""
        return self._answer.exhausted

    async def due(self) -> None:
        """Wait until `advance` returns at once."""
        await self._answer.due()

    async def advance(self) -> list[Choice]:
        """Wait for events and apply them; return the choices that changed.

        Raises:
            ApiError: a sequence ended with an error; the call is over.
        """
        received = await self._answer.read()
        if len(received) == 1:  # the common case: one token
            ((index, event),) = received
            return [self._apply(index, (event,))]
        by_choice: dict[int, list[Emitted | PromptScored | Finished]] = {}
        for index, event in received:
            by_choice.setdefault(index, []).append(event)
        return [self._apply(index, events) for index, events in by_choice.items()]

    def _apply(self, index: int, events: Sequence[Emitted | PromptScored | Finished]) -> Choice:
        choice = self.choices[index]
        if choice.take(events):
            self._recall.stop_sequence(self._answer, index)
        for event in events:
            if type(event) is PromptScored:
                self._score_prompt(choice, event)
            elif type(event) is Finished:
                self._check(choice, event)
        return choice

    def close(self, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel the sequences that have not ended; without any, do nothing."""
        self._recall.close(self._answer, why)

    def abort(self) -> None:
        """Cancel the sequences that have not ended; `advance` then raises the error `aborted`."""
        self._aborted = True
        self.close()

    def usage(self) -> dict[str, Any]:
        """What the call has used so far, with its cost if the client asked for it."""
        return {**self.tokens(), **self.cost()} if self.shows_cost else self.tokens()

    def tokens(self) -> dict[str, Any]:
        """The tokens of the call so far, in the form of ``usage``. It only reads, so any thread may call it."""
        return usage(
            sum(len(prompt.tokens) for prompt in self.prompts),
            sum(choice.output_tokens for choice in self.choices),
            sum(self._answer.cached_tokens[:: self.choices_per_prompt]),
            sum(choice.reasoning_tokens for choice in self.choices),
            sum(predicted.accepted for predicted in self._answer.predicted),
            sum(predicted.rejected for predicted in self._answer.predicted),
        )

    def cost(self) -> Mapping[str, Any]:
        """``cost`` and ``cost_details`` of the call so far; empty if the server has no prices."""
        price = self.model.cost
        return {} if price is None else price(choice.request.id for choice in self.choices)

    def prompt_of(self, choice: Choice) -> int:
        """The number of the prompt that a choice answers."""
        return choice.index // self.choices_per_prompt

    def _score_prompt(self, choice: Choice, event: PromptScored) -> None:
        scores = self.prompt_scores[self.prompt_of(choice)]
        for at, entry in enumerate(event.logprobs, event.start + 1):
            scores[at] = entry

    def _check(self, choice: Choice, finished: Finished) -> None:
        if finished.reason is FinishReason.FAILED:
            logger.error("request %s failed: %s", finished.request_id, finished.message)
        error = of_finish(finished, self._seconds, own_deadline=choice.request.deadline is not None)
        if self._aborted and finished.reason is FinishReason.CANCELLED:
            error = aborted()
        if error is not None and not choice.stopped_by_text:
            raise error


FIRST_AND_LAST = 2**31
"""As an interval: one delivery with the first token, and one at the end."""


def _interval(model: ServedModel, body: Generation, prompts: Sequence[Prompt], reports_begin: bool) -> int:
    """Tokens per delivery of events; 0: one delivery at the end. It is 1 if text, such as a stop string, can end it."""
    if any(prompt.ends_by_text for prompt in prompts):
        return 1
    if body.stream:
        return model.stream_interval
    return FIRST_AND_LAST if reports_begin else 0


def tenant_of_call(caller: Caller, body: Generation) -> str:
    """The tenant that the call is accounted to."""
    return tenant(caller.key_id, caller.tenant_header, body.user)


def cache_scope(caller: Caller, body: Generation) -> str:
    """The partition of the prefix cache: calls of one tenant with equal ``cache_salt`` share prefixes."""
    return f"{tenant_of_call(caller, body)}\0{body.cache_salt or ''}"


async def open_call(
    recall: Answers,
    model: ServedModel,
    body: Generation,
    prompts: Sequence[Prompt],
    caller: Caller,
    *,
    id_prefix: str,
    choices_per_prompt: int,
    request_timeout: float,
    turn: Callable[[], Turn | None] = no_turn,
    reports_begin: bool = False,
) -> Call:
    """Open a call: ``choices_per_prompt`` sequences of equal tokens for each prompt.

    With a seed, each prompt's first sequence has it, and the others have seeds derived from it; without, all differ.
    Only a prompt's first sequence returns prompt log-probabilities. ``turn`` finds the last user message. With
    ``reports_begin``, `Call.advance` returns at the first token too, also without a stream.

    Raises:
        ApiError: the server rejects the call or a token of it, or ``only-if-cached`` finds nothing.
        InvalidParameter: the request id is in use.
    """
    call_id = f"{id_prefix}{body.request_id or secrets.token_hex(12)}"
    tenant_name = tenant_of_call(caller, body)
    seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
    session = _session(body, caller, call_id)
    scheduling = scheduling_of(body, model.rules, tenant_name, request_timeout, caller.service_class)
    now, shows = recall.now(), _shows_cost(model, body, caller)
    directives, bars = control(body.response_cache, caller.cache_control), unknown_field(body)
    alone = len(prompts) * choices_per_prompt == 1
    choices, questions, pieces = list[Choice](), list[LookupRequest](), model.intake.pieces()
    for prompt in prompts:
        await pieces.turn()
        model.check_text(prompt.tokens, None)
        model.check_text(prompt.prediction, "prediction")
        stops = partial(_text_stream, model, prompt) if prompt.ends_by_text else None
        first = _request(model, body, caller, prompt, scheduling, now, session)
        for n in range(choices_per_prompt):
            index = len(choices)
            request = replace(
                first,
                id=call_id if alone else f"{call_id}-{index}",
                params=replace(prompt.params, prompt_logprobs=None) if n else prompt.params,
                seed=choice_seed(seed, n if body.seed is not None else index),
            )
            complete = _complete(model, prompt.params)
            choices.append(Choice(index, request, _text_stream(model, prompt), prompt.mute, complete))
            query = LookupRequest(request, directives, prompt.continues, stops, turn, bars, caller.origin)
            questions.append(query)
    if caller.exchange is not None:
        caller.exchange.opened(call_id, model.name, tenant_name, [each.request.id for each in questions])
    interval = _interval(model, body, prompts, reports_begin)
    answer = await _submitted(recall, questions, interval, _multiple(prompts, choices))
    await _submit_prompts(model, prompts, choices[::choices_per_prompt], session, pieces)
    seconds = scheduling.seconds or answer.requests[0].settings.request_timeout or request_timeout
    call = Call(call_id, model, prompts, choices, recall, answer, seconds, bool(body.stream), shows)
    if caller.exchange is not None:
        caller.exchange.call = call
    return call


async def _submit_prompts(
    model: ServedModel,
    prompts: Sequence[Prompt],
    firsts: Sequence[Choice],
    session: SessionOf | None,
    pieces: Pieces,
) -> None:
    """Report each prompt with the request of its first choice."""
    for prompt, choice in zip(prompts, firsts, strict=True):
        model.prompts.submit(choice.request, prompt.about, session)
        await pieces.turn()


async def _submitted(
    recall: Answers, questions: Sequence[LookupRequest], interval: int, multiple: str | None
) -> Answer:
    """The open answer to ``questions``; ``multiple`` is the field that asks for several.

    Raises:
        ApiError: the server rejects them, or ``only-if-cached`` finds nothing.
    """
    try:
        return await recall.open(questions, interval=interval)
    except Refused as refused:
        raise turned_away(refused.verdict, rate_headers(refused.rooms), multiple) from None
    except NotCached:
        raise not_cached() from None


def _multiple(prompts: Sequence[Prompt], choices: Sequence[Choice]) -> str | None:
    """The field that gives a call several sequences."""
    return "prompt" if len(prompts) > 1 else "n" if len(choices) > 1 else None


def _shows_cost(model: ServedModel, body: Generation, caller: Caller) -> bool:
    asked = bool(body.include_cost) or caller.asks_cost
    if asked and model.cost is None:
        field = "include_cost" if body.include_cost else COST_HEADER
        raise invalid(
            f"{field}: this server has no prices; it needs --device-price or prices of tokens", field
        )
    return asked


def _session(body: Generation, caller: Caller, call_id: str) -> SessionOf | None:
    hint = body.agent_hint
    named = session_of(
        body.session_id or caller.session,
        None if hint is None else hint.ttl_seconds,
        hint is not None and bool(hint.release),
    )
    if hint is not None and named is None:
        raise invalid("agent_hint needs session_id or the header X-Session-Id", "agent_hint")
    stored = caller.stored
    return session_of_stored(call_id, stored.previous, stored.seconds) if stored and not named else named


def _request(
    model: ServedModel,
    body: Generation,
    caller: Caller,
    prompt: Prompt,
    scheduling: Scheduling,
    now: float,
    session: SessionOf | None,
) -> Request:
    """A request with the fields that all sequences of a prompt share."""
    kept = retained(body.kv_transfer_params, body.prompt_cache_retention)
    if session is not None and model.prompts.sessions is not None:
        kept = (*kept, session.retention)
    tenant_name = tenant_of_call(caller, body)
    return Request(
        id="",
        tenant=tenant_name,
        peer=model.sharing.peer(body.kv_transfer_params),
        follows=body.kv_transfer_params is not None and body.kv_transfer_params.remote_prefill_runs,
        affinity=f"{tenant_name}\0{body.prompt_cache_key}" if body.prompt_cache_key else "",
        salt=cache_scope(caller, body),
        tokens=prompt.tokens,
        params=prompt.params,
        arrived=now,
        service_class=scheduling.service_class,
        priority=scheduling.priority,
        deadline=None if scheduling.seconds is None else now + scheduling.seconds,
        slo=scheduling.slo,
        retention=(*retentions(body, len(prompt.tokens)), *prompt.retention, *kept),
        prediction=prompt.prediction,
        eos_token_ids=model.tokenizer.eos_token_ids,
        call_format=prompt.call_format,
    )


def _complete(model: ServedModel, params: SamplingParams) -> Callable[[str], bool] | None:
    constraint, grammars = params.structured_outputs, model.grammars
    return None if constraint is None or grammars is None else partial(grammars.is_complete, constraint)


def _text_stream(model: ServedModel, prompt: Prompt) -> Texts:
    params, reading = prompt.params, prompt.reading
    stream = model.streams.open(
        prompt=prompt.tokens if prompt.continues else (),
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        keep=frozenset() if reading is None else model.tokens_of(reading.markers()),
    )
    if reading is None or reading.tools is None or reading.parallel:
        return stream
    return FirstCallStream(
        stream, reading.tools, reading.reasoning, reading.opened, reading.schemas, reading.limited
    )
