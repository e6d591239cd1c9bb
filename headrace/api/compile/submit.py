"""Compiles a request in four stages, from a typed body to a call whose requests the engine has; and is the last stage.

```
 door (openai, responses, anthropic, batch, warming)    its own wire types → ChatBody or CompletionBody
 1 render      messages and tools → text
 2 encode      → tokens, lengths
 3 constrain   schema, grammar, tool choice → sampling parameters
 4 submit      class, deadline, tenant, cache scope → requests, looked up and submitted
```
Each stage reads and completes the `Draft`; the first three are one file each. The last one gives the engine's requests
their class, deadline, retention and cache scope, and looks them up. Next: `response_cache.lookup`. The call's events
come back to `call`, and through it to the same door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from headrace.api.compile.bodies import ChatBody, CompletionBody
from headrace.api.compile.call import Answers, Call, Choice, Prompt, Prompted
from headrace.api.compile.constrain import constrain
from headrace.api.compile.draft import AnyDraft, ChatDraft, TextDraft
from headrace.api.compile.encode import conversation_tokens, encode_chat, encode_texts
from headrace.api.compile.fields import NO_TARGETS, SchedulingFields, SloBody, control, ways
from headrace.api.compile.model import ServedModel
from headrace.api.compile.policies import Rules, SessionOf, retained, session_of, session_of_stored
from headrace.api.compile.render import check_choice, facts_of, prepare_texts, render_chat
from headrace.api.errors import invalid, not_cached, turned_away
from headrace.api.exchange import COST_HEADER, Caller
from headrace.api.rate_limit_headers import rate_headers
from headrace.api.wire import Wire
from headrace.core.request import Request, Retention, SamplingParams, Slo, choice_seed
from headrace.core.tenancy.quota import KV_LIMITS
from headrace.core.tenancy.tenants import ServiceClass, TenantTerms
from headrace.response_cache.lookup import NotCached
from headrace.response_cache.query import LookupRequest
from headrace.service.answer import Answer
from headrace.service.service import Pieces, Refused
from headrace.text.stream import FirstCallStream, Texts

FIRST_AND_LAST = 2**31
"""As an interval: one delivery with the first token, and one at the end."""

PRIORITIES = {"priority": -100, "default": 0, "flex": 100, "background": 200}
"""The ``priority`` of a class under the policy `priority`, which has no classes; lower runs sooner."""


async def open_chat(
    answers: Answers,
    model: ServedModel,
    body: ChatBody,
    caller: Caller,
    request_timeout: float,
    id_prefix: str = "chatcmpl-",
    shorten: bool = False,
    reports_begin: bool = False,
) -> Call:
    """Compile and submit a conversation. ``answers`` as in `call.Answers`; the other parameters are those of `Draft`.

    Raises:
        ApiError: the request is invalid, or the server rejects it.
        InvalidParameter: a value is outside its range.
    """
    draft = ChatDraft(body, model, caller, request_timeout, id_prefix, shorten, reports_begin)
    await render_chat(draft)
    await encode_chat(draft)
    await constrain(draft)
    return await _submit(answers, draft)


async def open_completion(
    answers: Answers, model: ServedModel, body: CompletionBody, caller: Caller, request_timeout: float
) -> Call:
    """Compile and submit texts to continue.

    Raises:
        ApiError: the request is invalid, or the server rejects it.
        InvalidParameter: a value is outside its range.
    """
    draft = TextDraft(body, model, caller, request_timeout, "cmpl-")
    prepare_texts(draft)
    await encode_texts(draft)
    await constrain(draft)
    return await _submit(answers, draft)


async def count_chat(model: ServedModel, body: ChatBody, caller: Caller) -> int:
    """The number of tokens of a conversation's prompt, as `open_chat` makes it.

    Raises:
        ApiError: the conversation cannot be rendered.
    """
    check_choice(model.dialect, body, facts_of(model.dialect, body))
    return len(await conversation_tokens(model, body, caller.tenant(body.user)))


async def _submit(answers: Answers, draft: AnyDraft) -> Call:
    """Stage 4. Submit a draft: ``choices_per_prompt`` sequences of equal tokens for each prompt.

    With a seed, each prompt's first sequence has it, and the others have seeds derived from it; without, all differ.
    Only a prompt's first sequence returns prompt log-probabilities.

    Raises:
        ApiError: the server rejects the call or a token of it, or ``only-if-cached`` finds nothing.
        InvalidParameter: the request id is in use.
    """
    body, model, caller, prompts = draft.body, draft.model, draft.caller, draft.prompts
    session = _session(draft)
    scheduling = scheduling_of(body, model.rules, draft.tenant, draft.request_timeout, caller.service_class)
    now, shows_cost = answers.now(), _shows_cost(draft)
    choices, pieces = list[Choice](), model.intake.pieces()
    for prompt in prompts:
        await pieces.turn()
        model.check_text(prompt.tokens, None)
        model.check_text(prompt.prediction, "prediction")
        first = _request(draft, prompt, scheduling, now, session, len(choices))
        choices += _choices(draft, prompt, first, len(choices))
    lookups = _lookups(draft, choices, session)
    if caller.exchange is not None:
        caller.exchange.opened(
            draft.call_id, draft.named.name, draft.tenant, [each.request.id for each in lookups]
        )
    multiple = "prompt" if len(prompts) > 1 else "n" if len(choices) > 1 else None
    answer = await _submitted(answers, lookups, _interval(draft), _paced(draft), multiple)
    await _record_prompts(draft, choices[:: draft.choices_per_prompt], session, pieces)
    seconds = scheduling.seconds or answer.requests[0].settings.request_timeout or draft.request_timeout
    made = draft.call_id, model, draft.named.name, prompts, choices, answers, answer, seconds
    call = Call(*made, bool(body.stream), shows_cost)
    if caller.exchange is not None:
        caller.exchange.call = call
    return call


def _choices(draft: AnyDraft, prompt: Prompt, first: Request, begin: int) -> list[Choice]:
    """The sequences of one prompt, numbered from ``begin``; ``first`` is the request of the first one."""
    choices, seeded = list[Choice](), draft.body.seed is not None
    complete, request = _complete(draft.model, prompt.params), first
    for n in range(draft.choices_per_prompt):
        index = begin + n
        if n:
            request = replace(
                first,
                id=f"{draft.call_id}-{index}",
                params=replace(prompt.params, prompt_logprobs=None),
                seed=choice_seed(draft.seed, n if seeded else index),
            )
        choices.append(Choice(index, request, text_stream(draft.model, prompt), prompt.mute, complete))
    return choices


def _lookups(draft: AnyDraft, choices: Sequence[Choice], session: SessionOf | None) -> list[LookupRequest]:
    """What the caches need to know of each sequence."""
    body, caller, lookups = draft.body, draft.caller, list[LookupRequest]()
    directives, bars = control(body.response_cache, caller.cache_control), unknown_field(body)
    for choice in choices:
        prompt = draft.prompts[choice.index // draft.choices_per_prompt]
        stops = partial(text_stream, draft.model, prompt) if prompt.ends_by_text else None
        first = choice.index % draft.choices_per_prompt == 0
        asked = choice.request, directives, prompt.continues, stops, draft.turn, bars, caller.origin
        lookups.append(LookupRequest(*asked, Prompted(prompt, session, first)))
    return lookups


def unknown_field(body: Wire) -> str:
    """The first field that ``body`` sets and that has no kind; empty if there is none.

    Such a request is not cached. So a new field cannot cause wrong hits, and a test fails until it has a kind.
    """
    return next((name for name in _without_kind(type(body)) if name in body.model_fields_set), "")


@cache
def _without_kind(form: type[Wire]) -> tuple[str, ...]:
    return tuple(sorted(form.model_fields.keys() - ways(form).keys()))


def _request(
    draft: AnyDraft, prompt: Prompt, scheduling: Scheduling, now: float, session: SessionOf | None, index: int
) -> Request:
    """The request of a prompt's first sequence, the ``index``-th of the call."""
    alone = len(draft.prompts) * draft.choices_per_prompt == 1
    body, model, transfer = draft.body, draft.model, draft.body.kv_transfer_params
    kept = retained(transfer, body.prompt_cache_retention)
    if session is not None and model.prompts.keeps_sessions:
        kept = (*kept, session.retention)
    return Request(
        id=draft.call_id if alone else f"{draft.call_id}-{index}",
        tenant=draft.tenant,
        model=draft.named.name,
        peer=model.sharing.peer(transfer),
        follows=transfer is not None and transfer.remote_prefill_runs,
        affinity=f"{draft.tenant}\0{body.prompt_cache_key}" if body.prompt_cache_key else "",
        salt=draft.scope,
        adapter=draft.named.adapter,
        tokens=prompt.tokens,
        params=prompt.params,
        seed=choice_seed(draft.seed, 0 if draft.body.seed is not None else index),
        arrived=now,
        service_class=scheduling.service_class,
        priority=scheduling.priority,
        deadline=None if scheduling.seconds is None else now + scheduling.seconds,
        slo=scheduling.slo,
        retention=(*retentions(body, len(prompt.tokens)), *prompt.retention, *kept),
        prediction=prompt.prediction,
        eos_token_ids=model.tokenizer.eos_token_ids,
        call_format=prompt.call_format,
        images=prompt.images,
    )


async def _submitted(
    answers: Answers, lookups: Sequence[LookupRequest], interval: int, paced: bool, multiple: str | None
) -> Answer:
    """The open answer to ``lookups``; ``multiple`` is the field that asks for several.

    Raises:
        ApiError: the server rejects them, or ``only-if-cached`` finds nothing.
    """
    try:
        return await answers.open(lookups, interval=interval, paced=paced)
    except Refused as refused:
        large = "max_tokens" if refused.verdict.limit in KV_LIMITS else multiple
        raise turned_away(refused.verdict, rate_headers(refused.rooms), large) from None
    except NotCached:
        raise not_cached() from None


async def _record_prompts(
    draft: AnyDraft, firsts: Sequence[Choice], session: SessionOf | None, pieces: Pieces
) -> None:
    """Record each prompt with the request of its first choice."""
    for prompt, choice in zip(draft.prompts, firsts, strict=True):
        draft.model.prompts.submit(choice.request, prompt.about, session)
        await pieces.turn()


def _interval(draft: AnyDraft) -> int:
    """Tokens per delivery of events; 0: one delivery at the end. It is 1 if text, such as a stop string, can end it."""
    if any(prompt.ends_by_text for prompt in draft.prompts):
        return 1
    if draft.body.stream:
        return draft.model.stream_interval
    return FIRST_AND_LAST if draft.reports_begin else 0


def _paced(draft: AnyDraft) -> bool:
    """Whether events may hold more tokens under load: a stream that text cannot end."""
    return bool(draft.body.stream) and not any(prompt.ends_by_text for prompt in draft.prompts)


def _shows_cost(draft: AnyDraft) -> bool:
    asked = bool(draft.body.include_cost) or draft.caller.asks_cost
    if asked and draft.model.cost is None:
        field = "include_cost" if draft.body.include_cost else COST_HEADER
        raise invalid(
            f"{field}: this server has no prices; it needs --device-price or prices of tokens", field
        )
    return asked


def _session(draft: AnyDraft) -> SessionOf | None:
    hint, stored = draft.body.agent_hint, draft.caller.stored
    named = session_of(
        draft.body.session_id or draft.caller.session,
        None if hint is None else hint.ttl_seconds,
        hint is not None and bool(hint.release),
    )
    if hint is not None and named is None:
        raise invalid("agent_hint needs session_id or the header X-Session-Id", "agent_hint")
    return (
        session_of_stored(draft.call_id, stored.previous, stored.seconds) if stored and not named else named
    )


class Scheduling(NamedTuple):
    """The fields as a `core.request.Request` has them; ``seconds`` until its deadline, None without one."""

    service_class: str
    priority: int
    slo: Slo
    seconds: float | None


def scheduling_of(
    body: SchedulingFields, rules: Rules, tenant: str, request_timeout: float, assigned: str = ""
) -> Scheduling:
    """The scheduling parameters of a request. A class ``assigned`` by the server replaces the one that the fields name.

    ```
     service_tier   auto: the tenant's own class; default, flex, priority: that class, if the tenant may use it
     priority       orders within the class; without service_tier its sign selects the class too
     slo            TTFT and TPOT targets in milliseconds; default: those of the class
     deadline_ms    milliseconds after which the request ends with 408
    ```
    A field that the scheduling policy does not use is refused, because it would have no effect.

    Raises:
        ApiError: a field that the policy does not use, a class that the tenant may not use, or a deadline after the
            server's timeout.
    """
    if rules.policy in ("fcfs", "static"):
        _refuse(body, rules.policy)
        service_class = assigned or "default"
    else:
        service_class = assigned or _class(body, rules.tenants.terms(tenant), tenant)
    priority = body.priority
    if rules.policy == "priority" and priority is None:
        priority = PRIORITIES[service_class]
    return Scheduling(
        service_class,
        priority or 0,
        _slo(body.slo, rules.classes[service_class]),
        _deadline(body.deadline_ms, request_timeout),
    )


def retentions(body: SchedulingFields, prompt_tokens: int) -> tuple[Retention, ...]:
    """The retentions that ``body`` asks for, checked against the length of the prompt.

    Raises:
        ApiError: a range is empty or reaches beyond the prompt.
    """
    asked = []
    for i, each in enumerate(body.retention or ()):
        path = f"retention[{i}]"
        if each.end is not None and each.end <= each.start:
            raise invalid(f"{path}.end ({each.end}) must be above {path}.start ({each.start})", f"{path}.end")
        for name, value in (("start", each.start + 1), ("end", each.end or 0)):
            if value > prompt_tokens:
                raise invalid(
                    f"{path}.{name} is beyond the prompt's {prompt_tokens} tokens", f"{path}.{name}"
                )
        asked.append(Retention(each.start, each.end, each.priority, each.ttl_seconds))
    return tuple(asked)


def _refuse(body: SchedulingFields, policy: str) -> None:
    for param, value, neutral in (
        ("priority", body.priority, (None, 0)),
        ("service_tier", body.service_tier, (None, "auto", "default")),
        ("slo", body.slo, (None, NO_TARGETS)),
    ):
        if value not in neutral:
            raise invalid(f"{param} needs another --scheduling-policy than this server's {policy}", param)


def _class(body: SchedulingFields, terms: TenantTerms, tenant: str) -> str:
    named, param = body.service_tier, "service_tier"
    if named is None and body.priority:
        named, param = "priority" if body.priority < 0 else "flex", "priority"
    if named in (None, "auto"):
        return terms.default_class
    if not terms.may_use(named):
        allowed = ", ".join(sorted(terms.classes | {terms.default_class}))
        raise invalid(f"{param}: tenant {tenant!r:.200} may use {allowed}, not {named}", param)
    return named


def _slo(asked: SloBody | None, service_class: ServiceClass) -> Slo:
    given = asked or NO_TARGETS
    default = service_class.slo
    return Slo(
        default.ttft_seconds if given.ttft_ms is None else given.ttft_ms / 1000,
        default.tpot_seconds if given.tpot_ms is None else given.tpot_ms / 1000,
    )


def _deadline(deadline_ms: int | None, request_timeout: float) -> float | None:
    if deadline_ms is None:
        return None
    if deadline_ms > 1000 * request_timeout:
        limit = round(1000 * request_timeout)
        message = f"deadline_ms must be at most {limit}: the server ends every request then"
        raise invalid(message, "deadline_ms")
    return deadline_ms / 1000


def _complete(model: ServedModel, params: SamplingParams) -> Callable[[str], bool] | None:
    constraint, grammars = params.structured_outputs, model.grammars
    return None if constraint is None or grammars is None else partial(grammars.is_complete, constraint)


def text_stream(model: ServedModel, prompt: Prompt) -> Texts:
    """The text of an output of ``prompt``."""
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
