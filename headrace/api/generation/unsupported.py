"""Known fields that this server does not support yet: refused by name, never ignored.

Each name is listed with its neutral values. They are accepted, because many clients always send the field with its
default; so is ``null``. When a field becomes supported, it moves from these tables to the request's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.api.errors import not_supported

NotYet = Mapping[str, tuple[object, ...]]

_ANYWHERE: dict[str, tuple[object, ...]] = {
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "repetition_detection": (),
    "store": (False,),
    "safety_identifier": (),
}

CHAT: NotYet = _ANYWHERE | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "echo": (False,),
    "best_of": (1,),
}

COMPLETIONS: NotYet = _ANYWHERE | {
    "thinking_token_budget": (),
    "prompt_embeds": (),
}

TOKENIZE: NotYet = {"mm_processor_kwargs": ({},)}

DETOKENIZE: NotYet = {}

MESSAGE: NotYet = {"function_call": (), "audio": ()}
_ROLES = ("function",)


def refuse_unsupported(body: Mapping[str, Any], not_yet: NotYet) -> dict[str, Any]:
    """``body`` without the fields of ``not_yet``.

    Raises:
        ApiError: one of them has a value that is not neutral.
    """
    kept = without(body, not_yet, "")
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return kept


def _message(message: object, path: str) -> object:
    """One message without neutral unsupported fields; a value that is no object is left to validation."""
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    if role in _ROLES:
        raise not_supported(f"{path}.role", f"The role {role!r}")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise not_supported(f"{path}.content[{i}].type", f"Content of type {kind!r}")
    return without(message, MESSAGE, f"{path}.")


def without(body: Mapping[str, Any], not_yet: NotYet, path: str) -> dict[str, Any]:
    """``body`` without the fields of ``not_yet``; ``path`` is its place in the request.

    Raises:
        ApiError: one of them has a value that is not neutral.
    """
    kept = {}
    for name, value in body.items():
        if name not in not_yet:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in not_yet[name]):
            raise not_supported(f"{path}{name}")
    return kept


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # True == 1, but not on the wire
