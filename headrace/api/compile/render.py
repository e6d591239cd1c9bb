"""Stage 1 of compiling a request: checks what its fields say together, and renders a conversation as text.

The text is that of the model's chat template, or of the request's own. Before that, known per-request markers are
moved or removed (`normalization`). Next: `encode`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.api.compile.bodies import (
    IMAGE,
    MAX_PROMPTS,
    AllowedChoice,
    ChatBody,
    CompletionBody,
    Conversation,
    Message,
    NamedChoice,
    call_rule,
)
from headrace.api.compile.draft import ChatDraft, Facts, Length, TextDraft
from headrace.api.compile.fields import Generation
from headrace.api.compile.model import Dialect, ServedModel
from headrace.api.compile.normalization import normalized
from headrace.api.compile.pictures import sent_images
from headrace.api.errors import invalid, not_supported
from headrace.response_cache.query import Turn
from headrace.response_cache.rules.key import Unkeyable, digest
from headrace.text.content import PromptText
from headrace.text.rendering import TemplateError
from headrace.text.template import NeedsProcess

UNLIMITED = -1
"""As ``max_tokens``: all that the context leaves after the prompt."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for text completions."""

RESERVED = ("self", "messages", "template", "add_generation_prompt", "continue_final_message")
"""Variables that a request cannot set: they have their own fields, or belong to jinja2."""

SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch reasoning on or off; the name depends on the model family."""

MESSAGE_CHARACTERS = 32
"""Characters of a text that take as long to render as a message without text."""

INLINE_CHARACTERS = 4096
"""Conversations up to this length without tools are rendered on the event loop (one or two milliseconds); longer ones
on a worker thread."""


async def render_chat(draft: ChatDraft) -> None:
    """Check a conversation, and render its prompt.

    Raises:
        ApiError: fields contradict each other or the server, or the conversation cannot be rendered.
    """
    body, model = draft.body, draft.model
    draft.images = sent_images(body)
    model.check_images(draft.images)
    if draft.images:
        _check_with_images(body)
    draft.length = _chat_length(body, model.defaults.params.max_tokens)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    draft.logprobs = body.alternatives
    _check_stream(body)
    _check_template(model, body)
    if body.prediction is not None and body.tools:
        raise invalid("prediction cannot be used together with tools", "prediction")
    draft.facts = facts_of(model.dialect, body)
    check_choice(model.dialect, body, draft.facts)
    markers = model.prompts.markers(model.rules.tenants, draft.tenant)
    body, draft.normalized = normalized(body, markers)
    draft.body = body
    draft.text = await render(model, body, draft.tenant, draft.facts)
    draft.opened = _opened(draft.facts, body, draft.text.text)
    draft.choices_per_prompt = body.n or 1
    draft.turn = partial(_turn, body)


def _check_with_images(body: ChatBody) -> None:
    """Raise `ApiError` 400 for fields that need a prompt of text alone."""
    for field in ("truncate_prompt_tokens", "prompt_logprobs", "kv_transfer_params"):
        if getattr(body, field) is not None:
            why = "is not supported for a prompt with images"
            raise invalid(f"{field} {why}", field, "unsupported_parameter")


def prepare_texts(draft: TextDraft) -> None:
    """Check a text completion, which needs no rendering.

    ``max_tokens`` 0 with ``echo`` asks only for the prompt's log-probabilities: one token is generated, not returned.
    ``best_of`` ranks by log-probabilities, so they are computed even if the client did not ask for them. ``echo`` with
    ``logprobs`` asks for the prompt's too.

    Raises:
        ApiError: fields contradict each other.
    """
    body = draft.body
    _check_stream(body)
    check_candidates(body)
    draft.choices_per_prompt = body.candidates
    draft.mute = bool(body.echo) and body.max_tokens == 0
    asked, default = 1 if draft.mute else body.max_tokens, DEFAULT_COMPLETION_TOKENS
    draft.length = Length(asked, "max_tokens", default, default if asked is None else asked)
    draft.logprobs = 0 if body.logprobs is None and body.candidates > (body.n or 1) else body.logprobs
    more: dict[str, Any] = {}
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.suffix and draft.model.infill is not None:
        more["stop_token_ids"] = list(dict.fromkeys((*(body.stop_token_ids or ()), *draft.model.infill.ends)))
    if more:
        draft.body = body.model_copy(update=more)


def _chat_length(body: ChatBody, default: int | None) -> Length:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        message = "max_tokens and max_completion_tokens must not differ; give one of them"
        raise invalid(message, "max_completion_tokens")
    asked, param = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    return Length(None, param, None, 1) if asked == UNLIMITED else Length(asked, param, default, asked or 1)


def _check_stream(body: Generation) -> None:
    """Raise `ApiError` 400 if fields contradict each other about streaming."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    asked = body.kv_transfer_params
    if asked is not None and asked.do_remote_decode and body.stream:
        raise invalid("kv_transfer_params.do_remote_decode cannot be streamed", "kv_transfer_params")


def check_candidates(body: CompletionBody) -> None:
    """Raise `ApiError` 400 if the number of outputs contradicts another field."""
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise invalid(f"best_of ({body.best_of}) must be at least n ({n})", "best_of")
    sequences = len(body.prompts()) * body.candidates
    if sequences > MAX_PROMPTS:
        param = "n" if n == body.candidates else "best_of"
        raise invalid(f"prompts times {param} must be at most {MAX_PROMPTS}, got {sequences}", param)
    if body.stream and body.candidates > n:
        raise invalid("best_of cannot be streamed: the best is known only at the end", "best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise invalid("logprobs of an echoed prompt cannot be streamed", "echo")


def check_choice(dialect: Dialect, body: ChatBody, facts: Facts) -> None:
    """Raise `ApiError` if ``tool_choice`` contradicts the tools, or if there is no parser for the calls."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return
    known = {tool.function.name for tool in body.tools}
    if isinstance(choice, NamedChoice) and choice.function.name not in known:
        name = choice.function.name
        raise invalid(f"tool_choice names the function {name!r:.200}, which is not in tools", "tool_choice")
    if isinstance(choice, AllowedChoice):
        _check_allowed(choice, known)
    if facts.rule.mode == "auto" and facts.calls is None:
        if body.chat_template is None:
            _check_tools(dialect, body, facts)  # a more specific error, if the template has no tools at all
        raise invalid(
            "tools: the chat template shows no known format of tool calls; name one with --tool-call-parser",
            "tools",
            "unsupported_parameter",
        )
    field = next(iter(body.constraining), None)
    if facts.rule.forced and field not in (None, "response_format"):
        raise invalid(f"tool_choice and {field} cannot both constrain the output", "tool_choice")


def _check_allowed(choice: AllowedChoice, known: Collection[str]) -> None:
    for at, tool in enumerate(choice.allowed_tools.tools):
        if tool.function.name not in known:
            path = f"tool_choice.allowed_tools.tools[{at}].function.name"
            why = f"there is no function {tool.function.name[:200]!r} in tools"
            raise invalid(f"Invalid value for {path!r:.200}: {why}.", path)


def _check_tools(dialect: Dialect, body: Conversation, facts: Facts) -> None:
    """Raise `ApiError` if the model may choose tools of ``body``, but its template does not show them."""
    if body.tools and facts.rule.mode == "auto" and not dialect.knows_tools(body.chat_template):
        raise invalid(
            "tools: the chat template of this model does not know tools", "tools", "unsupported_parameter"
        )


def _check_template(model: ServedModel, body: Conversation) -> None:
    """Raise `ApiError` if the conversation has a template of its own and the operator does not allow that."""
    if body.chat_template is not None and not model.trust_request_chat_template:
        raise invalid(
            "chat_template: this server does not render templates of requests; "
            "the operator can allow them with --trust-request-chat-template",
            "chat_template",
            "unsupported_parameter",
        )


def facts_of(dialect: Dialect, body: Conversation) -> Facts:
    """The facts of a conversation; without ``tool_choice``, as where a prompt is only counted, calls are allowed."""
    source = body.chat_template
    choice = body.tool_choice if isinstance(body, ChatBody) else None
    return Facts(call_rule(choice), dialect.tools(source), dialect.reasoning(source))


async def render(
    model: ServedModel, body: Conversation, tenant_name: str, facts: Facts | None = None
) -> PromptText:
    """The prompt's text, for a request of a tenant.

    Tools and long conversations are rendered on a worker thread. For a short conversation, switching threads would take
    longer than rendering. What needs a process of its own waits for the tenant's turn.

    Raises:
        ApiError: the template is broken, refuses the conversation or reaches a limit, or requests must not have one.
    """
    _check_template(model, body)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise invalid(message, "continue_final_message")
    work = partial(_render, model, body, facts or facts_of(model.dialect, body))
    size = sum(MESSAGE_CHARACTERS + len(message.text()) for message in body.messages)
    short = size <= INLINE_CHARACTERS
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


def _render(model: ServedModel, body: Conversation, facts: Facts, waits: bool = True) -> PromptText:
    _check_tools(model.dialect, body, facts)
    continues = bool(body.continue_final_message)
    return model.template.render(
        plain_messages(model.dialect, body, facts, IMAGE if model.images is None else model.images.part()),
        add_generation_prompt=not continues
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=continues,
        template=body.chat_template,
        waits=waits,
        images=model.images is not None,
        tools=[tool.plain() for tool in body.tools] if body.tools else None,
        **_variables(model.dialect, body),
    )


def _opened(facts: Facts, body: ChatBody, prompt: str) -> bool:
    """Whether the prompt has opened the reasoning, so that the output begins inside it."""
    reasoning = facts.reasoning
    if reasoning is None:
        return False
    if not body.continue_final_message:
        return reasoning.is_open(prompt)
    text = body.messages[-1].text()
    begun = max((text.rfind(marker) for marker in reasoning.begin), default=-1)
    ended = max((text.rfind(marker) for marker in reasoning.end), default=-1)
    return begun > ended or (reasoning.assumed and ended < 0)


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
            body.truncation_side,
        )
    except Unkeyable:
        return None
    return Turn(last.text(), context)


# Messages and variables in the template's form.


def plain_messages(
    dialect: Dialect, body: Conversation, facts: Facts, image: Mapping[str, Any] = IMAGE
) -> list[dict[str, Any]]:
    """The messages in the form that the template expects.

    Arguments of calls are an object, or text if the template needs text. Results of tools have the name of the function
    that was called. If the template allows only one call per message, each call becomes its own message, followed by
    its results.

    Raises:
        ApiError: a message lacks what its role demands.
    """
    _check_messages(body.messages)
    names = {call.id: call.function.name for message in body.messages for call in message.tool_calls or ()}
    as_text = bool(names) and dialect.arguments_are_text(body.chat_template)
    harmony = facts.reasoning is not None and facts.reasoning.name == "harmony"
    plain = []
    for message in body.messages:
        rendered = message.plain(image)
        if message.tool_calls and not as_text:
            for call in rendered["tool_calls"]:
                call["function"]["arguments"] = _object(call["function"]["arguments"])
        if harmony and message.tool_calls and not rendered["content"] and (thought := message.thought()):
            rendered["thinking"] = thought  # harmony templates' name for it
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            rendered["name"] = names[message.tool_call_id]
        plain.append(rendered)
    several = any(len(message.tool_calls or ()) > 1 for message in body.messages)
    if several and not dialect.takes_several_calls(body.chat_template):
        return _one_call_each(plain)
    return plain


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, split so that each has at most one tool call."""
    split: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        end = next((n for n in range(at, len(messages)) if messages[n]["role"] != "tool"), len(messages))
        results, at = list(messages[at:end]), end
        for number, call in enumerate(calls):
            base = message if number == 0 else {"role": "assistant", "content": ""}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            results = [result for result in results if result not in own]
            split += [base | {"tool_calls": [call]}, *own]
        split += results
    return split


def _object(arguments: str) -> Any:
    """The arguments as a JSON object, or the text itself if it is none (for example of a truncated call)."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _check_messages(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        calls = message.role == "assistant" and (message.tool_calls or message.thought())
        if message.content is None and not calls:
            if "content" in message.model_fields_set:
                why = "must be a string or a list of content parts"
                raise invalid(f"Invalid type for '{path}.content': {why}.", f"{path}.content", "invalid_type")
            missing = f"Missing required parameter: '{path}.content'."
            raise invalid(missing, f"{path}.content", "missing_required_parameter")
        if message.role == "tool" and message.tool_call_id is None:
            missing = f"Missing required parameter: '{path}.tool_call_id'."
            raise invalid(missing, f"{path}.tool_call_id", "missing_required_parameter")
        for field, role in (
            ("tool_call_id", "tool"),
            ("tool_calls", "assistant"),
            ("reasoning_content", "assistant"),
        ):
            if getattr(message, field) and message.role != role:
                why = f"only a message of the role {role} may have it"
                raise invalid(f"Invalid value for '{path}.{field}': {why}.", f"{path}.{field}")


def _variables(dialect: Dialect, body: Conversation) -> dict[str, Any]:
    """The variables for the template; ``chat_template_kwargs`` takes precedence over ``reasoning_effort``.

    Raises:
        ApiError: a variable has its own field, or the template has no switch for reasoning.
    """
    given = body.chat_template_kwargs or {}
    for name in given:
        if name in RESERVED:
            raise invalid(f"chat_template_kwargs must not have the key {name!r:.200}", "chat_template_kwargs")
        if name == "tools":
            raise invalid(
                "chat_template_kwargs must not have the key 'tools'; it is a field", "chat_template_kwargs"
            )
        if name == "documents":
            raise not_supported("chat_template_kwargs", f"The template variable {name!r:.200}")
    return _effort(dialect, body) | given


def _effort(dialect: Dialect, body: Conversation) -> dict[str, Any]:
    effort = body.reasoning_effort
    if effort is None:
        return {}
    known = dialect.variables(body.chat_template)
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in known else {}
    variables |= {name: effort != "none" for name in SWITCHES if name in known}
    if not variables and effort != "none":
        raise invalid(
            "reasoning_effort: the chat template of this model has no switch for reasoning",
            "reasoning_effort",
            "unsupported_parameter",
        )
    return variables
