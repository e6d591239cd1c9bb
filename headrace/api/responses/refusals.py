"""Fields, items and tools of the Responses API that are not supported: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.api.errors import not_supported
from headrace.api.generation.unsupported import NotYet

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
"""Each field with its neutral values, which are accepted; so is ``null``."""

INPUT_TOKENS: NotYet = {"conversation": (), "personality": (), "prompt": ()}
"""The same for ``POST /v1/responses/input_tokens``."""

ITEM_TYPES = frozenset(
    ("message", "function_call", "function_call_output", "reasoning", "compaction", "item_reference")
)
INPUT_PARTS = frozenset({"input_text", "output_text", "text"})
ANSWER_PARTS = INPUT_PARTS | {"refusal"}
OUTPUT_PARTS = frozenset({"input_text"})
TOOL_TYPES = frozenset({"function", "namespace", "web_search", "web_search_preview", "image_generation"})
"""The hosted tools among them are not offered to the model: coding agents send them always, and work without them."""


def known_items(value: Any) -> Any:
    """``value``, if it is no list of input items with unsupported types; other errors are left to validation.

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
        texts = ANSWER_PARTS if item.get("role") == "assistant" else INPUT_PARTS
        for field, parts in (("content", texts), ("output", OUTPUT_PARTS)):
            if item.get("type") != "reasoning" and isinstance(item.get(field), list):
                _check_all(item[field], parts, f"{path}.{field}", "Content")
    return value


def known_tools(value: Any) -> Any:
    """``value``, a list of tools; raise `ApiError` for tools of unsupported types."""
    if isinstance(value, list):
        _check_all(value, TOOL_TYPES, "tools", "A tool")
        for at, tool in enumerate(value):
            if isinstance(tool, dict) and isinstance(tool.get("tools"), list):
                _check_all(tool["tools"], frozenset({"function"}), f"tools[{at}].tools", "A tool")
    return value


def known_choice(value: Any) -> Any:
    """``value``, a ``tool_choice``; raise `ApiError` for an unsupported type."""
    if isinstance(value, dict):
        _check(value, frozenset({"function", "allowed_tools"}), "tool_choice", "A tool_choice")
        if isinstance(value.get("tools"), list):
            _check_all(value["tools"], frozenset({"function"}), "tool_choice.tools", "An allowed tool")
    return value


def _check_all(values: Iterable[Any], known: frozenset[str], path: str, what: str) -> None:
    for at, each in enumerate(values):
        if isinstance(each, dict):
            _check(each, known, f"{path}[{at}]", what)


def _check(value: dict[str, Any], known: frozenset[str], path: str, what: str) -> None:
    kind = value.get("type")
    if isinstance(kind, str) and kind not in known:
        raise not_supported(f"{path}.type", f"{what} of type {kind[:64]!r}")
