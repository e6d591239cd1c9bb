"""The table of known per-request markers: text that clients put into system messages and that changes by request.

One changed token near the beginning of a prompt makes everything after it uncacheable. Each row says how such text is
found, and what normalization does with it if it is enabled. No pattern backtracks far.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


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
        raise ValueError(f"{unknown[0]!r:.200} is not a marker; expected one of {', '.join((ALL, *MARKERS))}")
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
