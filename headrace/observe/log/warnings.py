"""Warnings made from events: overload, preemption storms, failed audits, drafts and copies to disk.

Each kind of warning is logged at once when it first happens, and then at most every `REPORT_SECONDS` with the number of
events since, so that an overloaded server does not fill its log.
"""

from __future__ import annotations

import logging
from collections import deque

from headrace.core.events import Audited, DraftingFailed, Event, Preempted, TransferFailed, TurnedAway
from headrace.observe.reasons import reason_text

REPORT_SECONDS = 10.0
"""Shortest time between two lines of the same kind."""

STORM_SECONDS = 10.0
STORM_PREEMPTIONS = 20
"""This many preemptions within `STORM_SECONDS` are a preemption storm."""

STORM_REPORT_SECONDS = 60.0
"""Shortest time between two warnings of a preemption storm."""

_admission = logging.getLogger("headrace.admission")
_scheduler = logging.getLogger("headrace.scheduler")
_cache = logging.getLogger("headrace.cache")


class _Report:
    """Events of one kind that have not been logged yet."""

    __slots__ = ("count", "due", "logger", "message")

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self.logger = logger
        self.message = message
        self.count = 0
        self.due = float("-inf")


class WarningLog:
    """A `core.ports.Watcher` that logs warnings; it needs no `Emitted` events."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._unlogged = 0
        self._preempted: deque[tuple[float, int]] = deque()
        self._storm_due = float("-inf")

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, TurnedAway):
            what = f"request rejected: {reason_text(event.reason)}"
            self._add(f"rejected {event.reason}", _admission, what, now)
        elif isinstance(event, Preempted):
            self._count_preemption(event.lost_tokens, now)
        elif isinstance(event, DraftingFailed):
            what = f"speculative decoding failed and is switched off: {event.message}"
            self._add("drafting", _scheduler, what, now)
        elif isinstance(event, Audited):
            if not event.right:
                what = f"audit failed: the {event.layer} cache served an answer that differs from the computed one"
                self._add(f"audit {event.layer}", _cache, what, now)
        elif isinstance(event, TransferFailed):
            what = f"copy of KV blocks from {event.source} to {event.target} failed"
            self._add(f"transfer {event.source} {event.target}", _scheduler, what, now)
        if self._unlogged:
            self._log_due(now)

    def _add(self, kind: str, logger: logging.Logger, message: str, now: float) -> None:
        report = self._reports.get(kind)
        if report is None:
            report = self._reports[kind] = _Report(logger, message)
        report.count += 1
        self._unlogged += 1

    def _log_due(self, now: float) -> None:
        for report in self._reports.values():
            if report.count and now >= report.due:
                report.logger.warning(report.message, extra={"fields": {"count": report.count}})
                self._unlogged -= report.count
                report.count = 0
                report.due = now + REPORT_SECONDS

    def _count_preemption(self, lost_tokens: int, now: float) -> None:
        recent = self._preempted
        recent.append((now, lost_tokens))
        while recent[0][0] < now - STORM_SECONDS:
            recent.popleft()
        if len(recent) >= STORM_PREEMPTIONS and now >= self._storm_due:
            self._storm_due = now + STORM_REPORT_SECONDS
            fields = {"count": len(recent), "lost_tokens": sum(lost for _, lost in recent)}
            _scheduler.warning(
                "preemption storm: the KV cache is too small for the running requests; "
                "lower --max-num-seqs or give the cache more memory",
                extra={"fields": fields | {"seconds": STORM_SECONDS}},
            )
