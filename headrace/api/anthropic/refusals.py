"""Anthropic's fields, tools and blocks that this server does not support: refused by name, never ignored.

Neutral values are accepted, as in `generation.unsupported`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.api.errors import ApiError, not_supported
from headrace.api.generation.unsupported import NotYet, without

MESSAGES: NotYet = {
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
    "user_profile_id": (),
    "workspace_id": (),
}
"""Fields of a request, with their neutral values."""

TOOL: NotYet = {
    "allowed_callers": (["direct"], []),
    "defer_loading": (False,),
    "input_examples": ([],),
}
"""Fields of a tool, with their neutral values."""

BLOCKS = (
    *("image", "document", "search_result", "container_upload", "tool_reference"),
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "compaction", "browser_state"),
)
"""Kinds of content blocks."""


def refuse(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` without unsupported fields that have a neutral value.

    Raises:
        ApiError: it uses something that is not supported.
    """
    if body.get("thread") is not None:
        raise thread_unsupported()
    kept = without(body, MESSAGES, "")
    tools = kept.get("tools")
    if isinstance(tools, list):
        kept["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    messages = kept.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _blocks(message.get("content"), f"messages[{number}].content")
    _blocks(kept.get("system"), "system")
    return kept


def thread_unsupported() -> ApiError:
    """400: the client wants the server to store the conversation.

    The details of this error make Anthropic's clients send the whole conversation.
    """
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    message = "thread is not supported yet: send the whole conversation"
    return ApiError(400, message, param="thread", code="unsupported_parameter", details=details)


def _tool(tool: object, path: str) -> object:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "custom":
        raise not_supported(f"{path}.type", f"{path}.type: a tool of type {kind[:80]!r}")
    return without(tool, TOOL, f"{path}.")


def _blocks(content: object, path: str) -> None:
    for number, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        where = f"{path}[{number}]"
        if block.get("type") in BLOCKS:
            raise not_supported(f"{where}.type", f"{where}: content of type {block['type']!r}")
        if block.get("type") == "tool_result":
            _blocks(block.get("content"), f"{where}.content")
