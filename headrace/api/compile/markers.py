"""The table of known per-request markers: text that clients put into system messages and that changes by request.

One changed token near the beginning of a prompt makes everything after it uncacheable. Each row says how such text is
found, and what normalization does with it if it is enabled. No pattern backtracks far.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from headrace.api.compile.bodies import Conversation, Message, TextPart


class Action(StrEnum):
    """What normalization does with a marker."""

    REMOVED = "removed"
    MOVED_TO_FIRST_USER = "moved_to_first_user_message"
    MOVED_TO_END = "moved_to_last_message"


class Marker(NamedTuple):
    """A kind of per-request text. ``risk`` says what removing or moving it changes for the model."""

    name: str
    pattern: re.Pattern[str]
    action: Action
    about: str
    risk: str


def _lines(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE | re.IGNORECASE)


MARKERS: dict[str, Marker] = {
    marker.name: marker
    for marker in (
        Marker(
            "billing_header",
            _lines(r"^x-anthropic-billing-header:[^\n]*(?:\n+|\Z)"),
            Action.REMOVED,
            "The line `x-anthropic-billing-header: …` that Claude Code sends first, with a new nonce each time.",
            "None: it addresses the provider's accounting, not the model.",
        ),
        Marker(
            "current_date",
            _lines(
                r"^[ \t]*(?:[-*] )?(?:<current_?(?:date|time)>[^\n]{0,80}"
                r"|(?:the )?(?:today['\u2019]s date|current date|current time|current date and time|today)"
                r"(?: is|:)[^\n]{0,80})(?:\n|\Z)"
            ),
            Action.MOVED_TO_FIRST_USER,
            "A line with the date or the time, such as `Today's date: 2026-11-25`.",
            "The date stands in the first user message, which a model may trust less than the system message.",
        ),
        Marker(
            "git_status",
            _lines(
                r"^gitStatus:[^\n]*\n(?:\n*(?:Current branch|Main branch|Git user|Status|Recent commits)"
                r"[^\n]*(?:\n|\Z)(?:[^\n]+(?:\n|\Z))*)*"
            ),
            Action.MOVED_TO_FIRST_USER,
            "The block `gitStatus: …` of coding agents: branch, changed files, recent commits.",
            "The block stands in the first user message.",
        ),
        Marker(
            "total_tokens",
            _lines(r"<total_tokens>[^<\n]{0,60}</total_tokens>(?:\n|\Z)?"),
            Action.MOVED_TO_END,
            "The remaining token budget, `<total_tokens>N left</total_tokens>`; only the last one is kept.",
            "The budget stands in the last user or tool message instead of the system message.",
        ),
    )
}
"""All markers by name, in the order in which they are applied; the one that changes most often is moved last."""


ALL = "all"
"""Stands for every marker in options."""


WINDOW = 8_192
"""Characters on each side of a position that are searched for a marker around it."""


def chosen(names: Iterable[str]) -> tuple[Marker, ...]:
    """The markers with these names.

    Raises:
        ValueError: a name is not a marker's; the message lists the names.
    """
    wanted = set(names)
    if unknown := sorted(wanted - MARKERS.keys() - {ALL}):
        raise ValueError(f"{unknown[0]!r} is not a marker; expected one of {', '.join((ALL, *MARKERS))}")
    return tuple(marker for name, marker in MARKERS.items() if name in wanted or ALL in wanted)


def known_marker(name: str) -> str:
    """``name``, if it is a marker's or `ALL`.

    Raises:
        ValueError: as `chosen`.
    """
    chosen((name,))
    return name


def marker_at(text: str, at: int) -> str:
    """The name of the marker around a character; empty if there is none."""
    begin = max(0, at - WINDOW)
    begin = text.rfind("\n", 0, begin) + 1 if begin else 0
    for marker in MARKERS.values():
        for found in marker.pattern.finditer(text, begin, min(len(text), at + WINDOW)):
            if found.start() <= at < max(found.end(), found.start() + 1):
                return marker.name
    return ""


NORMALIZED_HEADER = "X-Headrace-Normalized"

ConversationT = TypeVar("ConversationT", bound=Conversation)


class Applied(NamedTuple):
    """A marker, what was done with it, and how many ``times`` it was found."""

    marker: str
    action: Action
    times: int


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
    parts = [part.model_copy(update={"text": cut(part.text)}) for part in content]
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
