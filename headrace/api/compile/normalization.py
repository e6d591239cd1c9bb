"""Known per-request markers are removed from system messages, or moved to where they do not break a cached prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from headrace.api.compile.bodies import Conversation, Message, TextPart
from headrace.api.compile.draft import Applied
from headrace.api.compile.markers import Action, Marker

NORMALIZED_HEADER = "X-Headrace-Normalized"

ConversationT = TypeVar("ConversationT", bound=Conversation)


def normalized(body: ConversationT, markers: Sequence[Marker]) -> tuple[ConversationT, tuple[Applied, ...]]:
    """``body`` with its markers removed or moved, and what was done; ``body`` itself if it has none.

    If there is no message to move text to, the text stays.
    """
    messages, done = list(body.messages), list[Applied]()
    for marker in markers:
        target = _target(messages, marker.action)
        if target is None and marker.action is not Action.REMOVED:
            continue
        found: list[str] = []
        changed = [_without(each, marker, found) if _may_change(each) else each for each in messages]
        if not found:
            continue
        if target is not None:
            kept = found[-1:] if marker.action is Action.MOVED_TO_END else found
            changed[target] = _with(changed[target], "\n".join(text.strip("\n") for text in kept))
        messages = changed
        done.append(Applied(marker.name, marker.action, len(found)))
    if not done:
        return body, ()
    kept_messages = [each for each in messages if not (_may_change(each) and _is_empty(each))]
    return body.model_copy(update={"messages": kept_messages or messages}), tuple(done)


def header(done: Sequence[Applied]) -> dict[str, str]:
    """The response header that lists what was done; empty if nothing was."""
    return (
        {NORMALIZED_HEADER: ", ".join(f"{each.marker}={each.action.value}" for each in done)} if done else {}
    )


def described(done: Sequence[Applied]) -> list[dict[str, Any]]:
    """What was done, for the request's explanation."""
    return [{"marker": each.marker, "action": each.action.value, "times": each.times} for each in done]


def _may_change(message: Message) -> bool:
    return message.role in ("system", "developer")


def _target(messages: Sequence[Message], action: Action) -> int | None:
    """The index of the message that text is moved to."""
    numbers = range(len(messages))
    if action is Action.MOVED_TO_FIRST_USER:
        return next((n for n in numbers if messages[n].role == "user"), None)
    if action is Action.MOVED_TO_END:
        return next((n for n in reversed(numbers) if messages[n].role in ("user", "tool")), None)
    return None


def _without(message: Message, marker: Marker, found: list[str]) -> Message:
    """The message without the marker, which is added to ``found``."""

    def cut(text: str) -> str:
        texts = [match[0] for match in marker.pattern.finditer(text)]
        found.extend(texts)
        return marker.pattern.sub("", text) if texts else text

    content = message.content
    if content is None:
        return message
    if isinstance(content, str):
        text = cut(content)
        return message if text == content else message.model_copy(update={"content": text})
    parts = [
        part.model_copy(update={"text": cut(part.text)}) for part in content if isinstance(part, TextPart)
    ]  # system messages have no images
    if all(old.text == new.text for old, new in zip(content, parts, strict=True)):
        return message
    return message.model_copy(update={"content": _merged(parts)})


def _merged(parts: Sequence[TextPart]) -> list[TextPart]:
    """Parts without empty ones; a cache mark of an empty part passes to the one before it."""
    kept: list[TextPart] = []
    for part in parts:
        if part.text:
            kept.append(part)
        elif part.cache_control is not None and kept and kept[-1].cache_control is None:
            kept[-1] = kept[-1].model_copy(update={"cache_control": part.cache_control})
    return kept


def _is_empty(message: Message) -> bool:
    return not message.text()


def _with(message: Message, text: str) -> Message:
    """The message with ``text`` after its own."""
    content = message.content
    if isinstance(content, str):
        return message.model_copy(update={"content": f"{content}\n\n{text}" if content else text})
    parts = [*(content or ()), TextPart(type="text", text=text)]
    return message.model_copy(update={"content": parts})
