"""The drafts of one request, for its explanation: by source, and what bounded their length."""

from __future__ import annotations

from collections import Counter
from typing import Any

from headrace.core.drafting.draft_budget import Cut
from headrace.core.events import DraftDeclined, DraftedStep, DraftingFailed, Verified
from headrace.observe.metrics_page import MetricsPage
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


# Counts speculative decoding: drafted and accepted tokens by source and position, and the speed-up.


class DraftLedger:
    """Counts the events of drafts, which `observe.metrics` passes on."""

    def __init__(self, page: MetricsPage) -> None:
        source = ["source"]
        self._drafts = page.counter(
            "spec_decode_num_drafts", "Drafts verified; one per request and step.", source
        )
        self._drafted = page.counter("spec_decode_num_draft_tokens", "Drafted tokens verified.", source)
        self._accepted = page.counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", source)
        self._expected = page.counter(
            "spec_decode_num_expected_tokens",
            "Drafted tokens whose acceptance was expected, by the estimates that drafts are cut by.",
            source,
        )
        self._by_position = page.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by position in the draft.",
            ["position", "source"],
        )
        self._cuts = page.counter("spec_decode_cuts", "Drafts, by what bounded their length.", ["reason"])
        self._declined = page.counter(
            "spec_decode_declined",
            "Times that drafting stopped for a request although tokens were proposed, by reason.",
            ["reason"],
        )
        self._seconds = page.counter(
            "spec_decode_predicted_seconds",
            "Predicted time of steps with drafts (drafted), of the same tokens without drafts (without_drafts), and of "
            "the tokens expected beforehand (expected_without_drafts).",
            ["tokens"],
        )
        self._failures = page.counter(
            "spec_decode_failures", "Failures of the drafter; the first one switches drafting off."
        ).of()

    def verified(self, event: Verified, now: float) -> None:
        """Drafts of a row were verified."""
        self._drafts.of(event.source).value += 1
        self._drafted.of(event.source).value += event.drafted
        self._accepted.of(event.source).value += event.accepted
        self._expected.of(event.source).value += event.expected
        for position in range(event.accepted):
            self._by_position.of(str(position), event.source).value += 1
        if event.cut:
            self._cuts.of(str(event.cut)).value += 1

    def declined(self, event: DraftDeclined, now: float) -> None:
        """Drafting stopped for a request."""
        self._declined.of(str(event.cut)).value += 1

    def stepped(self, event: DraftedStep, now: float) -> None:
        """A step with drafts was committed."""
        self._seconds.of("drafted").value += event.seconds
        self._seconds.of("without_drafts").value += event.without
        self._seconds.of("expected_without_drafts").value += event.expected

    def failed(self, event: DraftingFailed, now: float) -> None:
        """The drafter failed."""
        self._failures.value += 1
