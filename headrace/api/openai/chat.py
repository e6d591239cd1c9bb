"""``POST /v1/chat/completions``: renders messages into a prompt, and writes the response in OpenAI's format."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from headrace.api import structured
from headrace.api.errors import ApiError, invalid
from headrace.api.generation.call import (
    Answers,
    Call,
    Prompt,
    cache_scope,
    open_call,
    tenant_of_call,
)
from headrace.api.generation.caller import Caller
from headrace.api.generation.choices import NOTHING, Choice, Delta
from headrace.api.generation.kv_fields import MARKED_RETENTION
from headrace.api.generation.logprobs import chat_logprobs, prompt_entries, prompt_logprobs
from headrace.api.generation.sampling import (
    UNLIMITED,
    answer_length,
    check_length,
    check_stream,
    room_for_answer,
    sampling_params,
    truncated,
)
from headrace.api.generation.writing import Writer, encode, encode_lines, encode_text
from headrace.api.model import INLINE_CHARACTERS, ServedModel
from headrace.api.openai.chat_wire import ChatBody, Conversation
from headrace.api.openai.template_switches import template_variables
from headrace.api.openai.tool_use import (
    answer_reading,
    check_choice,
    check_tools,
    constrained,
    plain_messages,
)
from headrace.api.prompts.entry import about_chat
from headrace.api.prompts.normalize import normalized
from headrace.api.tools.message_writing import delta_of, message_of
from headrace.core.request import Retention
from headrace.response_cache.query import Turn
from headrace.response_cache.rules.key import Unkeyable, digest
from headrace.text.content import PromptText
from headrace.text.parsing.message import MessagePiece
from headrace.text.template import NeedsProcess, TemplateError

MAX_MARKS = 4
"""As many as Anthropic allows; each costs rendering and tokenizing its part of the conversation again."""


async def open_chat(
    recall: Answers,
    model: ServedModel,
    body: ChatBody,
    caller: Caller,
    request_timeout: float,
    id_prefix: str = "chatcmpl-",
    shorten: bool = False,
    reports_begin: bool = False,
) -> Call:
    """Render, tokenize and submit a conversation; the call's id begins with ``id_prefix``.

    ``shorten`` reduces ``max_tokens`` to what the context leaves, instead of refusing the request. ``reports_begin`` as
    in `open_call`.

    Raises:
        ApiError: the request is invalid, or the server rejects it.
    """
    max_tokens, param, default = _max_tokens(body, model.defaults.params.max_tokens)
    top = _top_logprobs(body)
    _check(model, body)
    body, done = normalized(body, model.prompts.markers(model.rules.tenants, tenant_of_call(caller, body)))
    rendered = await render(model, body, tenant_of_call(caller, body))
    text = rendered.text
    check_length(text, body, model, shorten=shorten)
    whole = await model.encode_prompt(rendered, bool(body.add_special_tokens), cache_scope(caller, body))
    tokens = truncated(whole, body, model, max_tokens or 1)
    if shorten and max_tokens is not None:
        max_tokens = min(max_tokens, room_for_answer(len(tokens), model.max_model_len))
    most = model.defaults.most_tokens
    length = answer_length(len(tokens), max_tokens, default, param, model.max_model_len, most)
    stated = None if max_tokens is None and default is None and most is None else length
    params = sampling_params(body, model, max_tokens=stated, logprobs=top)
    params = constrained(params, model.dialect, body, text)
    await structured.check(model, params, body)
    prompt = Prompt(
        tuple(tokens),
        params,
        continues=bool(body.continue_final_message),
        retention=await _marked(model, body, tenant_of_call(caller, body), tokens),
        reading=answer_reading(model.dialect, body, text),
        prediction=await _predicted(model, body),
        about=about_chat(model, body, text, tokens, done),
    )
    return await open_call(
        recall,
        model,
        body,
        [prompt],
        caller,
        id_prefix=id_prefix,
        choices_per_prompt=body.n or 1,
        request_timeout=request_timeout,
        turn=partial(_turn, body),
        reports_begin=reports_begin,
    )


def _check(model: ServedModel, body: ChatBody) -> None:
    """Raise `ApiError` 400 if fields contradict each other or the server."""
    check_stream(body)
    check_template(model, body)
    if body.prediction is not None and body.tools:
        raise invalid("prediction cannot be used together with tools", "prediction")
    check_choice(model.dialect, body)


async def count_chat(model: ServedModel, body: ChatBody, caller: Caller) -> int:
    """The number of tokens of a conversation's prompt, as `open_chat` makes it.

    Raises:
        ApiError: the conversation cannot be rendered.
    """
    check_choice(model.dialect, body)
    tenant_name = tenant_of_call(caller, body)
    body, _ = normalized(body, model.prompts.markers(model.rules.tenants, tenant_name))
    rendered = await render(model, body, tenant_name)
    return len(await model.encode_prompt(rendered, bool(body.add_special_tokens)))


def check_template(model: ServedModel, body: Conversation) -> None:
    """Raise `ApiError` if the conversation has a template of its own and the operator does not allow that."""
    if body.chat_template is not None and not model.trust_request_chat_template:
        raise invalid(
            "chat_template: this server does not render templates of requests; "
            "the operator can allow them with --trust-request-chat-template",
            "chat_template",
            "unsupported_parameter",
        )


async def render(model: ServedModel, body: Conversation, tenant_name: str) -> PromptText:
    """The prompt's text, for a request of a tenant.

    Tools and long conversations are rendered on a worker thread. For a short conversation, switching threads would take
    longer than rendering. What needs a process of its own waits for the tenant's turn.

    Raises:
        ApiError: the template is broken, refuses the conversation or reaches a limit, or requests must not have one.
    """
    check_template(model, body)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise invalid(message, "continue_final_message")
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    work = partial(_render, model, body, opens, continues)
    short = sum(len(message.text()) for message in body.messages) <= INLINE_CHARACTERS
    param = "messages" if body.chat_template is None else "chat_template"
    try:
        if body.chat_template is None:
            try:
                here = partial(work, waits=False)
                return here() if short and not body.tools else await asyncio.to_thread(here)
            except NeedsProcess:
                pass
        return await model.template_lanes.run(tenant_name, work, param)
    except TemplateError as error:
        raise invalid(str(error), param, "template_error") from None


def _render(
    model: ServedModel, body: Conversation, opens: bool, continues: bool, waits: bool = True
) -> PromptText:
    check_tools(model.dialect, body)
    return model.template.render(
        plain_messages(model.dialect, body),
        add_generation_prompt=opens,
        continue_final_message=continues,
        template=body.chat_template,
        waits=waits,
        tools=[tool.plain() for tool in body.tools] if body.tools else None,
        **template_variables(model.dialect, body),
    )


async def _marked(
    model: ServedModel, body: ChatBody, tenant_name: str, tokens: list[int]
) -> tuple[Retention, ...]:
    """The retentions that ``cache_control`` asks for: each from the prompt's beginning to the end of its message."""
    marks = [
        (number, mark)
        for number, message in enumerate(body.messages, start=1)
        if (mark := message.mark()) is not None
    ]
    if len(marks) > MAX_MARKS:
        raise invalid(f"at most {MAX_MARKS} messages may have cache_control, got {len(marks)}", "messages")
    return tuple(
        [
            Retention(
                0, await _end_of(model, body, tenant_name, number, tokens), MARKED_RETENTION, mark.seconds
            )
            for number, mark in marks
        ]
    )


async def _end_of(
    model: ServedModel, body: ChatBody, tenant_name: str, messages: int, tokens: list[int]
) -> int:
    """The number of prompt tokens of its first ``messages``; all tokens if these cannot be rendered alone."""
    if messages == len(body.messages):
        return len(tokens)
    opening = body.model_copy(
        update={
            "messages": body.messages[:messages],
            "add_generation_prompt": False,
            "continue_final_message": None,
        }
    )
    try:
        opened = await render(model, opening, tenant_name)
    except ApiError:  # a template may require alternating turns, or a user's at the end
        return len(tokens)
    known = await model.encode_prompt(opened, bool(body.add_special_tokens))
    return next((at for at, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(known))


class ChatWriter(Writer):
    """Writes a call as a ``chat.completion`` or its chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, call: Call, body: ChatBody) -> None:
        super().__init__(call, body)
        self._top = _top_logprobs(body)
        self._prompt_top = body.prompt_logprobs
        reading = call.prompts[0].reading
        self._forced = reading is not None and reading.forced
        self._readers = [] if reading is None else [reading.open() for _ in call.choices]

    @property
    def writes_tokens(self) -> bool:
        return self._top is not None or self._token_ids or bool(self._readers)

    def opening(self) -> bytes:
        inner = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        if self._token_ids:
            inner += f',"prompt_token_ids":{encode(self._call.prompts[0].tokens)}'
        return b"".join([self._event(choice, inner) for choice in self._call.choices])

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        scores = (
            "null"
            if self._top is None
            else encode(chat_logprobs(self._call.model, delta.logprobs, self._top))
        )
        if self._readers:
            piece = self._read(choice, delta)
            if not piece and self._top is None and not self._token_ids:
                return b""
            message = encode_lines(delta_of(piece))
        else:
            message = f'{{"content":{encode_text(delta.text)}}}'
        inner = f'"delta":{message},"logprobs":{scores},"finish_reason":null'
        if self._token_ids:
            inner += f',"token_ids":{encode(delta.tokens)}'
        return self._event(choice, inner)

    def ending(self, choice: Choice) -> bytes:
        rest = self._readers[choice.index].finish() if self._readers else None
        held = b""
        if rest:
            held = self._event(
                choice, f'"delta":{encode_lines(delta_of(rest))},"logprobs":null,"finish_reason":null'
            )
        return held + self._event(
            choice,
            f'"delta":{{}},"logprobs":null,"finish_reason":"{self._finish_reason(choice)}",'
            f'"stop_reason":{encode(choice.stop_reason)}',
        )

    def _read(self, choice: Choice, delta: Delta) -> MessagePiece:
        """What ``delta`` adds to the message, once reasoning and tool calls are parsed."""
        reader = self._readers[choice.index]
        piece = reader.push(delta.text, delta.texts)
        choice.reasoning_tokens = reader.reasoning_tokens
        return piece

    def _finish_reason(self, choice: Choice) -> str | None:
        called = bool(self._readers) and self._readers[choice.index].calls > 0
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def choices(self) -> list[dict[str, Any]]:
        shown = []
        for choice in self._call.choices:
            delta = choice.gained() or NOTHING
            scores = None if self._top is None else chat_logprobs(self._call.model, delta.logprobs, self._top)
            message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
            if self._readers:
                piece = self._read(choice, delta)
                message = message_of([piece, self._readers[choice.index].finish()], self._forced)
            shown.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": scores,
                    "finish_reason": self._finish_reason(choice),
                    "stop_reason": choice.stop_reason,
                }
                | ({"token_ids": delta.tokens} if self._token_ids else {})
            )
        return shown

    def _extra(self) -> dict[str, Any]:
        prompt = self._call.prompts[0]
        extra = super()._extra() | ({"prompt_token_ids": prompt.tokens} if self._token_ids else {})
        if self._prompt_top is not None:
            entries = prompt_entries(prompt.tokens, self._call.prompt_scores[0])
            extra["prompt_logprobs"] = prompt_logprobs(self._call.model, entries, self._prompt_top)
        return extra


def _turn(body: ChatBody) -> Turn | None:
    """The last user message, and a digest of everything else that shapes the prompt; None if it cannot be reused."""
    last = body.messages[-1]
    if last.role != "user" or (body.n or 1) > 1 or body.tools:
        return None
    try:
        context = digest(
            [message.plain() for message in body.messages[:-1]],
            last.name,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template,
            body.chat_template_kwargs,
            body.reasoning_effort,
            body.add_special_tokens,
            body.truncate_prompt_tokens,
        )
    except Unkeyable:
        return None
    return Turn(last.text(), context)


async def _predicted(model: ServedModel, body: ChatBody) -> tuple[int, ...]:
    """The tokens of the output that the client expects; none without ``prediction``."""
    if body.prediction is None:
        return ()
    tokens = await model.encode(body.prediction.text(), False)
    if len(tokens) > model.max_model_len:
        message = f"prediction.content has {len(tokens)} tokens; the maximum context length is {model.max_model_len}"
        raise invalid(message, "prediction.content")
    return tuple(tokens)


def _max_tokens(body: ChatBody, default: int | None) -> tuple[int | None, str, int | None]:
    """The requested maximum length, the name of its field, and the length if there is none (None: all that the context
    leaves).
    """
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        message = "max_tokens and max_completion_tokens must not differ; give one of them"
        raise invalid(message, "max_completion_tokens")
    asked, param = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    return (None, param, None) if asked == UNLIMITED else (asked, param, default)


def _top_logprobs(body: ChatBody) -> int | None:
    """The number of alternatives per token that are requested; None: no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return None
