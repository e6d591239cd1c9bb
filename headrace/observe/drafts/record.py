"""The drafts of one request, for its explanation: by source, and what bounded their length."""

from __future__ import annotations

from collections import Counter
from typing import Any

from headrace.core.drafting.draft_budget import Cut
from headrace.core.events import DraftDeclined, Verified
from headrace.observe.reasons import reason_text


class DraftingRecord:
    """Folds the events of drafts of one request."""

    __slots__ = ("_cuts", "_declined", "_sources")

    def __init__(self) -> None:
        self._sources: dict[str, list[float]] | None = None  # drafts, drafted, accepted, expected tokens
        self._cuts: Counter[str] | None = None
        self._declined = ""

    def verified(self, event: Verified) -> None:
        """Drafts were verified."""
        if self._sources is None:
            self._sources = {}
        counts = self._sources.setdefault(event.source, [0, 0, 0, 0.0])
        for at, value in enumerate((1, event.drafted, event.accepted, event.expected)):
            counts[at] += value
        self._declined = ""
        self._cut(event.cut)

    def declined(self, event: DraftDeclined) -> None:
        """Proposals of the request are not verified until further notice."""
        self._declined = event.cut
        self._cut(event.cut)

    def shown(self) -> dict[str, Any] | None:
        """Plain values for JSON; None without drafts and reasons."""
        if self._sources is None and self._cuts is None:
            return None
        return {
            "sources": {
                source: {
                    "drafts": int(drafts),
                    "drafted_tokens": int(drafted),
                    "accepted_tokens": int(accepted),
                    "expected_tokens": round(expected, 3),
                }
                for source, (drafts, drafted, accepted, expected) in (self._sources or {}).items()
            },
            "bounded_by": dict(self._cuts or {}),
            "declined_because": _text(self._declined) if self._declined else None,
        }

    def _cut(self, cut: str) -> None:
        if cut:
            if self._cuts is None:
                self._cuts = Counter()
            self._cuts[str(cut)] += 1


def _text(cut: str) -> str:
    return reason_text(Cut(cut)) if cut in set(Cut) else cut
