"""Tools and reasoning of a conversation: checks the request, puts its history into the template's form, and decides
from the prompt how outputs are parsed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.api.compile.bodies import (
    AllowedChoice,
    CallRule,
    ChatBody,
    Conversation,
    Message,
    NamedChoice,
    call_rule,
)
from headrace.api.compile.model import Dialect
from headrace.api.errors import invalid
from headrace.api.structured import demand, refused
from headrace.api.tools.constraint import constraint_for_tools
from headrace.core.constraint import (
    ANY_TEXT,
    Constraint,
    ConstraintKind,
    ReasoningLimit,
    UnusableConstraint,
    WrittenFloat,
    as_constraint,
)
from headrace.core.request import SamplingParams
from headrace.text.parsing.catalogue import PLAIN_JSON
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat
from headrace.text.parsing.message import Reading


def check_tools(dialect: Dialect, body: Conversation) -> None:
    """Raise `ApiError` if the model may choose tools of ``body``, but its template does not show them."""
    if body.tools and _rule(body).mode == "auto" and not dialect.knows_tools(body.chat_template):
        raise invalid(
            "tools: the chat template of this model does not know tools", "tools", "unsupported_parameter"
        )


def check_choice(dialect: Dialect, body: ChatBody) -> None:
    """Raise `ApiError` if ``tool_choice`` contradicts the tools, or if there is no parser for the calls."""
    choice, rule = body.tool_choice, _rule(body)
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return
    known = {tool.function.name for tool in body.tools}
    if isinstance(choice, NamedChoice) and choice.function.name not in known:
        name = choice.function.name
        raise invalid(f"tool_choice names the function {name!r}, which is not in tools", "tool_choice")
    if isinstance(choice, AllowedChoice):
        _check_allowed(choice, known)
    if rule.mode == "auto" and dialect.tools(body.chat_template) is None:
        if body.chat_template is None:
            check_tools(dialect, body)  # a more specific error, if the template has no tools at all
        raise invalid(
            "tools: the chat template shows no known format of tool calls; name one with --tool-call-parser",
            "tools",
            "unsupported_parameter",
        )
    field = demand(body)
    if rule.forced and field not in (None, "response_format"):
        raise invalid(f"tool_choice and {field} cannot both constrain the output", "tool_choice")


def _check_allowed(choice: AllowedChoice, known: Collection[str]) -> None:
    for at, tool in enumerate(choice.allowed_tools.tools):
        if tool.function.name not in known:
            path = f"tool_choice.allowed_tools.tools[{at}].function.name"
            why = f"there is no function {tool.function.name[:200]!r} in tools"
            raise invalid(f"Invalid value for {path!r}: {why}.", path)


def _rule(body: Conversation) -> CallRule:
    """What ``tool_choice`` says; without that field, as for a prompt that is only counted, the model may call tools."""
    return call_rule(body.tool_choice if isinstance(body, ChatBody) else None)


def _format(dialect: Dialect, body: ChatBody) -> ToolFormat | None:
    """The format of calls: the model's, or plain JSON where a grammar forces a model that has none."""
    found = dialect.tools(body.chat_template)
    return PLAIN_JSON if found is None and _rule(body).forced else found


def constrained(params: SamplingParams, dialect: Dialect, body: ChatBody, prompt: str) -> SamplingParams:
    """``params`` with all constraints on the output for ``prompt``: its format, its tool calls and its reasoning.

    A required call has no text, so ``response_format`` does not apply to it. Otherwise an output has the format that
    ``params`` already demand, or calls tools. These constraints begin after the reasoning.

    Raises:
        ApiError: it cannot be enforced.
    """
    made = params.structured_outputs
    reasoning = dialect.reasoning(body.chat_template)
    opened = reasoning is not None and _opened(reasoning, body, prompt)
    if made is None or _rule(body).forced:
        made = _tools_constraint(dialect, body, prompt)
    else:
        made = or_calls(made, dialect, body)
        if reasoning is not None and opened:
            made = replace(made, after=reasoning.end[0])
    if body.thinking_token_budget is not None:
        made = replace(made or ANY_TEXT, reasoning=_limit(reasoning, body.thinking_token_budget, opened))
    return params if made is params.structured_outputs else replace(params, structured_outputs=made)


def _tools_constraint(dialect: Dialect, body: ChatBody, prompt: str) -> Constraint | None:
    found = tool_constraint(dialect, body, prompt)
    if found is None:
        return None
    try:
        made = as_constraint({"structural_tag": found.tag})
    except UnusableConstraint as error:
        raise refused(error, "tools", None) from None
    return replace(made, after=found.after) if found.after else made


def _limit(reasoning: ReasoningFormat | None, tokens: int, opened: bool) -> ReasoningLimit:
    if reasoning is None:
        raise invalid(
            "thinking_token_budget: the chat template of this model shows no known format of reasoning; "
            "name one with --reasoning-parser",
            "thinking_token_budget",
            "unsupported_parameter",
        )
    return ReasoningLimit(tokens, reasoning.begin, reasoning.end, opened, reasoning.first)


def or_calls(stated: Constraint, dialect: Dialect, body: ChatBody) -> Constraint:
    """``stated``, or calls of the tools: with ``response_format``, an output that calls no tool is JSON.

    Only ``stated`` if calls cannot be distinguished from text, or if another field made the constraint.
    """
    json_text = body.response_format is not None and stated.kind is ConstraintKind.JSON
    written = dialect.tools(body.chat_template)
    if not json_text or not body.tools or written is None or body.tool_choice == "none":
        return stated
    parallel = body.parallel_tool_calls is not False
    tag = constraint_for_tools(body.tools, _rule(body)._replace(mode="required"), written, parallel=parallel)
    try:
        schema = json.loads(stated.source, parse_float=WrittenFloat)
    except ValueError:
        return stated
    return stated if tag is None else as_constraint({"structural_tag": tag | {"otherwise": schema}})


class ToolConstraint(NamedTuple):
    """A structural tag, and the text after which it applies: the end of reasoning, if the prompt opened it."""

    tag: dict[str, Any]
    after: str


def tool_constraint(dialect: Dialect, body: ChatBody, prompt: str) -> ToolConstraint | None:
    """The constraint of ``tools`` and ``tool_choice`` on the output for ``prompt``; None if there is none."""
    written = _format(dialect, body)
    if written is None:
        return None
    parallel = body.parallel_tool_calls is not False
    tag = constraint_for_tools(body.tools or (), _rule(body), written, parallel=parallel)
    reasoning = dialect.reasoning(body.chat_template)
    opened = reasoning is not None and _opened(reasoning, body, prompt)
    after = reasoning.end[0] if reasoning is not None and opened else ""
    return None if tag is None else ToolConstraint(tag, after)


def answer_reading(dialect: Dialect, body: ChatBody, prompt: str) -> Reading | None:
    """How outputs for ``prompt`` are parsed; None if they are plain text."""
    rule = _rule(body)
    tools = _format(dialect, body) if body.tools and rule.mode != "none" else None
    reasoning = dialect.reasoning(body.chat_template)
    if tools is None and reasoning is None:
        return None
    functions = [tool.function for tool in body.tools or () if rule.allows(tool.function.name)]
    return Reading(
        tools,
        reasoning,
        opened=reasoning is not None and _opened(reasoning, body, prompt),
        schemas={function.name: _properties(function.parameters) for function in functions},
        limited=rule.names is not None,
        forced=tools is not None and rule.forced,
        parallel=body.parallel_tool_calls is not False,
        show_reasoning=body.include_reasoning is not False,
    )


def _opened(reasoning: ReasoningFormat, body: ChatBody, prompt: str) -> bool:
    if not body.continue_final_message:
        return reasoning.is_open(prompt)
    text = body.messages[-1].text()
    begun = max((text.rfind(marker) for marker in reasoning.begin), default=-1)
    ended = max((text.rfind(marker) for marker in reasoning.end), default=-1)
    return begun > ended or (reasoning.assumed and ended < 0)


def _properties(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    found = (schema or {}).get("properties")
    return dict(found) if isinstance(found, Mapping) else {}


def plain_messages(dialect: Dialect, body: Conversation) -> list[dict[str, Any]]:
    """The messages in the form that the template expects.

    Arguments of calls are an object, or text if the template needs text. Results of tools have the name of the function
    that was called. If the template allows only one call per message, each call becomes its own message, followed by
    its results.

    Raises:
        ApiError: a message lacks what its role demands.
    """
    _check(body.messages)
    names = {call.id: call.function.name for message in body.messages for call in message.tool_calls or ()}
    as_text = bool(names) and dialect.arguments_are_text(body.chat_template)
    reasoning = dialect.reasoning(body.chat_template)
    harmony = reasoning is not None and reasoning.name == "harmony"
    plain = []
    for message in body.messages:
        rendered = message.plain()
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


def _check(messages: Sequence[Message]) -> None:
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
