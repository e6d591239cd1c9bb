"""Stage 4."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from headrace.api.auth.api_keys import tenant
from headrace.api.caller import COST_HEADER, Caller
from headrace.api.compile.call import Answers, Call, Choice, Prompt
from headrace.api.compile.fields import Generation, control, unknown_field
from headrace.api.compile.model import ServedModel
from headrace.api.compile.policies import (
    Scheduling,
    SessionOf,
    retained,
    retentions,
    scheduling_of,
    session_of,
    session_of_stored,
)
from headrace.api.errors import invalid, not_cached, turned_away
from headrace.api.rate_limit_headers import rate_headers
from headrace.core.request import SEED_BITS, Request, SamplingParams, choice_seed
from headrace.response_cache.lookup import NotCached
from headrace.response_cache.lookup_request import LookupRequest, no_turn
from headrace.response_cache.rules.response.query import Turn
from headrace.service.answer import Answer
from headrace.service.intake import Pieces
from headrace.service.service import Refused
from headrace.text.first_call import FirstCallStream
from headrace.text.stream import Texts

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
