"""What clients of the Responses API know and this server does not have: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.serve.http.errors import not_supported
from headrace.serve.http.generation.unsupported import NotYet

RESPONSES: NotYet = {
    "access_programs": (),
    "background_options": (),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "safety_identifier": (),
}
"""Each field with the values that ask for nothing, which pass; ``null`` asks for nothing everywhere."""

INPUT_TOKENS: NotYet = {"conversation": (), "personality": (), "prompt": ()}
"""The same for the counting of input tokens."""

ITEM_TYPES = frozenset(
    ("message", "function_call", "function_call_output", "reasoning", "compaction", "item_reference")
)
INPUT_PARTS = frozenset({"input_text", "output_text", "text"})
OUTPUT_PARTS = frozenset({"input_text"})
TOOL_TYPES = frozenset({"function", "namespace", "web_search", "web_search_preview", "image_generation"})
"""The last three are not offered to the model. Coding agents send them with every request, and work without them."""


def known_items(value: Any) -> Any:
    """``value``, a list of input items or something else for validation to judge.

    Raises:
        ApiError: an item, or a part of one, has a type that is not supported.
    """
    if not isinstance(value, list):
        return value
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            continue
        path = f"input[{at}]"
        _check(item, ITEM_TYPES, path, "An item")
        for field, parts in (("content", INPUT_PARTS), ("output", OUTPUT_PARTS)):
            if item.get("type") != "reasoning" and isinstance(item.get(field), list):
                _check_all(item[field], parts, f"{path}.{field}", "Content")
    return value


def known_tools(value: Any) -> Any:
    """``value``, a list of tools; tools that change what an answer may rest on are refused."""
    if isinstance(value, list):
        _check_all(value, TOOL_TYPES, "tools", "A tool")
        for at, tool in enumerate(value):
            if isinstance(tool, dict) and isinstance(tool.get("tools"), list):
                _check_all(tool["tools"], frozenset({"function"}), f"tools[{at}].tools", "A tool")
    return value


def known_choice(value: Any) -> Any:
    """``value``, a choice of tools."""
    if isinstance(value, dict):
        _check(value, frozenset({"function"}), "tool_choice", "A tool_choice")
    return value


def _check_all(values: Iterable[Any], known: frozenset[str], path: str, what: str) -> None:
    for at, each in enumerate(values):
        if isinstance(each, dict):
            _check(each, known, f"{path}[{at}]", what)


def _check(value: dict[str, Any], known: frozenset[str], path: str, what: str) -> None:
    kind = value.get("type")
    if isinstance(kind, str) and kind not in known:
        raise not_supported(f"{path}.type", f"{what} of type {kind[:64]!r}")
