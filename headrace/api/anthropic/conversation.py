"""Converts a request of the Messages API to a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace.api.anthropic.wire import (
    MIN_BUDGET,
    Block,
    CountBody,
    ImageBlock,
    InputMessage,
    MessagesBody,
    NamedToolChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolBody,
    ToolResultBlock,
    ToolUseBlock,
)
from headrace.api.body import valid
from headrace.api.compile.bodies import CacheMark, ChatBody, Conversation, ImagePart
from headrace.api.compile.model import Dialect
from headrace.api.compile.render import SWITCHES
from headrace.api.errors import invalid

_SHARED = (
    *(
        "model",
        "max_tokens",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "cache_salt",
        "response_cache",
    ),
    *(
        "prompt_cache_key",
        "priority",
        "slo",
        "deadline_ms",
        "retention",
        "request_id",
        "session_id",
        "agent_hint",
    ),
)
"""Fields that mean the same in both requests."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(dialect: Dialect, body: MessagesBody) -> ChatBody:
    """The chat request that corresponds to ``body``.

    Raises:
        ApiError: fields contradict each other, or the model's chat template does not support them.
    """
    asked = {name: getattr(body, name) for name in _SHARED if getattr(body, name) is not None}
    for name in ("response_cache", "slo", "agent_hint"):
        if name in asked:
            asked[name] = asked[name].model_dump(exclude_unset=True)
    if body.retention is not None:
        asked["retention"] = [each.model_dump(exclude_unset=True) for each in body.retention]
    if body.stop_sequences:
        asked["stop"] = body.stop_sequences
    if body.metadata is not None and body.metadata.user_id is not None:
        asked["user"] = body.metadata.user_id
    if body.service_tier is not None:
        asked["service_tier"] = "default" if body.service_tier == "standard_only" else body.service_tier
    budget = _budget(body)
    asked["include_reasoning"] = (
        _thinks(body) and body.thinking is not None and body.thinking.display != "omitted"
    )
    asked |= _choice(body)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    asked |= _conversation(dialect, body)
    if budget is not None:
        asked["thinking_token_budget"] = budget
        if dialect.reasoning(None) is None:
            path = "thinking.budget_tokens"
            why = "this model shows no known format of reasoning, so no budget can be enforced"
            raise invalid(f"{path}: {why}", path, "unsupported_parameter")
    return valid(ChatBody, asked)


def counted(dialect: Dialect, body: CountBody) -> Conversation:
    """The conversation whose tokens are counted.

    Raises:
        ApiError: as `chat_body`.
    """
    return valid(ChatBody, _conversation(dialect, body) | _choice(body))


_TOOL = re.compile(r"\btools\[(\d+)\]\.function\.parameters\b")


def tool_places(text: str) -> str:
    """``text`` with the schema of a tool named as the client's request does."""
    return _TOOL.sub(r"tools[\1].input_schema", text)


def _conversation(dialect: Dialect, body: CountBody) -> dict[str, Any]:
    messages = [*_system(body), *_turns(body.messages)]
    if body.cache_control is not None:
        messages[-1]["cache_control"] = _longer(messages[-1].get("cache_control"), body.cache_control)
    if mark := _mark(body.tools or ()):  # templates show tools at the beginning
        messages[0]["cache_control"] = _longer(messages[0].get("cache_control"), mark)
    asked: dict[str, Any] = {"messages": messages}
    if body.tools:
        asked["tools"] = [_tool(tool) for tool in body.tools]
    if body.messages[-1].role == "assistant":
        _check_prefill(body)
        asked |= {"continue_final_message": True, "add_generation_prompt": False}
    variables = _switches(dialect, body) | (body.chat_template_kwargs or {})
    return asked | ({"chat_template_kwargs": variables} if variables else {})


def _system(body: CountBody) -> list[dict[str, Any]]:
    system = body.system
    if not system:
        return []
    blocks = [TextBlock(type="text", text=system)] if isinstance(system, str) else system
    return [_message("system", [("system", block) for block in blocks])]


def _turns(messages: Sequence[InputMessage]) -> Iterator[dict[str, Any]]:
    """The messages for the template; consecutive messages of one role are one turn."""
    calls: set[str] = set()
    for turn in _joined(messages):
        if turn.role == "assistant":
            calls |= {block.id for _, block in turn.blocks if isinstance(block, ToolUseBlock)}
            yield _assistant(turn)
        else:
            yield from _user(turn, calls)


class _Turn(NamedTuple):
    """Blocks of one role, each with its place in the request."""

    role: str
    blocks: list[tuple[str, Block]]


def _joined(messages: Sequence[InputMessage]) -> list[_Turn]:
    turns: list[_Turn] = []
    for number, message in enumerate(messages):
        path = f"messages[{number}].content"
        if isinstance(message.content, str):
            placed: list[tuple[str, Block]] = [(path, TextBlock(type="text", text=message.content))]
        else:
            placed = [(f"{path}[{at}]", block) for at, block in enumerate(message.content)]
        if not placed:
            raise invalid(f"Invalid value for '{path}': must not be empty.", path)
        for where, block in placed:
            if message.role not in _ROLES[block.type]:
                roles = " or ".join(_ROLES[block.type])
                why = f"only a message of the role {roles} may have a block of type {block.type!r:.200}"
                raise invalid(f"Invalid value for '{where}': {why}.", where)
        if turns and turns[-1].role == message.role:
            turns[-1].blocks.extend(placed)
        else:
            turns.append(_Turn(message.role, placed))
    return turns


_ROLES: dict[str, tuple[str, ...]] = {
    "text": ("user", "assistant", "system"),
    "image": ("user",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
}


def _assistant(turn: _Turn) -> dict[str, Any]:
    blocks = [block for _, block in turn.blocks]
    text = "".join([block.text for block in blocks if isinstance(block, TextBlock)])
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if mark := _mark(blocks):
        message["cache_control"] = mark
    if thought := "".join([block.thinking for block in blocks if isinstance(block, ThinkingBlock)]):
        message["reasoning_content"] = thought
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": _json(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _user(turn: _Turn, calls: set[str]) -> Iterator[dict[str, Any]]:
    """Results of tools, each as a message, then the user's text."""
    for where, block in turn.blocks:
        if not isinstance(block, ToolResultBlock):
            continue
        if block.tool_use_id not in calls:
            path = f"{where}.tool_use_id"
            why = f"no earlier tool_use block has the id {block.tool_use_id!r:.200}"
            raise invalid(f"Invalid value for '{path}': {why}.", path)
        message: dict[str, Any] = {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": _result(where, block),
        }
        parts = block.content if isinstance(block.content, list) else ()
        if mark := _mark([block, *parts]):
            message["cache_control"] = mark
        yield message
    shown = [(place, block) for place, block in turn.blocks if isinstance(block, TextBlock | ImageBlock)]
    if shown:
        yield _message(turn.role, shown)


def _result(where: str, block: ToolResultBlock) -> str | list[Any]:
    content = block.content
    if content is None or isinstance(content, str):
        text = content or ""
    elif any(isinstance(part, ImageBlock) for part in content):
        opening = [{"type": "text", "text": "Error:"}] if block.is_error else []
        return [*opening, *[_part(f"{where}.content[{at}]", part) for at, part in enumerate(content)]]
    else:
        text = "\n".join([part.text for part in content if isinstance(part, TextBlock)])
    return f"Error: {text}" if block.is_error else text


def _part(place: str, block: TextBlock | ImageBlock) -> dict[str, Any] | ImagePart:
    if isinstance(block, ImageBlock):
        return ImagePart.at(place, *block.source.place())
    return {"type": "text", "text": block.text}


def _message(role: str, blocks: Sequence[tuple[str, TextBlock | ImageBlock]]) -> dict[str, Any]:
    parts = [_part(place, block) for place, block in blocks]
    content: Any = parts[0]["text"] if len(parts) == 1 and isinstance(parts[0], dict) else parts
    message = {"role": role, "content": content}
    if mark := _mark([block for _, block in blocks]):
        message["cache_control"] = mark
    return message


def _mark(marked: Sequence[Block | ToolBody]) -> dict[str, Any] | None:
    """The longest ``cache_control`` among ``marked``."""
    found = None
    for each in marked:
        if isinstance(each, ThinkingBlock | RedactedThinkingBlock):
            continue
        if each.cache_control is not None:
            found = _longer(found, each.cache_control)
    return found


def _longer(mark: dict[str, Any] | None, other: CacheMark | dict[str, Any]) -> dict[str, Any]:
    new = other if isinstance(other, dict) else other.model_dump(exclude_none=True)
    return new if mark is None or new.get("ttl") == "1h" else mark


def _tool(tool: ToolBody) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(body: CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if not body.tools and choice.type in ("any", "tool"):
        raise invalid("tool_choice needs tools", "tool_choice")
    asked: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if not isinstance(choice, NamedToolChoice):
        return asked | {"tool_choice": _CHOICES[choice.type]}
    if all(tool.name != choice.name for tool in body.tools or ()):
        raise invalid(f"tool_choice.name is {choice.name!r:.200}, which is not in tools", "tool_choice.name")
    return asked | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


def _check_prefill(body: CountBody) -> None:
    content = body.messages[-1].content
    blocks = [] if isinstance(content, str) else content
    if blocks and not isinstance(blocks[-1], TextBlock):
        path = f"messages[{len(body.messages) - 1}]"
        raise invalid(
            f"Invalid value for '{path}': the answer can only continue text, not a block of type {blocks[-1].type!r}.",
            path,
        )


def _budget(body: MessagesBody) -> int | None:
    """The maximum tokens of reasoning."""
    thinking = body.thinking
    if thinking is None:
        return None
    budget, path = thinking.budget_tokens, "thinking.budget_tokens"
    if thinking.type != "enabled":
        if budget is not None:
            raise invalid(f"{path} needs thinking.type to be enabled", path)
    elif budget is None:
        raise invalid(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    elif not MIN_BUDGET <= budget < body.max_tokens:
        why = f"must be at least {MIN_BUDGET} and less than max_tokens ({body.max_tokens}), got {budget}"
        raise invalid(f"Invalid value for '{path}': {why}.", path)
    return budget


def _thinks(body: CountBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _switches(dialect: Dialect, body: CountBody) -> dict[str, Any]:
    """The chat template's variables for reasoning: its switches and its effort."""
    known = dialect.variables(None)
    thinks = _thinks(body)
    variables: dict[str, Any] = {name: thinks for name in SWITCHES if name in known}
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None and "reasoning_effort" in known:
        variables["reasoning_effort"] = "xhigh" if effort == "max" else effort
    wanted = body.thinking is not None and body.thinking.type == "enabled"
    if wanted and not variables and "reasoning_effort" not in known and dialect.reasoning(None) is None:
        raise invalid(
            "thinking: the chat template of this model has no switch for reasoning",
            "thinking",
            "unsupported_parameter",
        )
    return variables


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
