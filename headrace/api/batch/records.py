"""Files and batches as values: their fields, the states of a batch, and the transitions between them.

```
validating ─┬─> in_progress ─┬─> finalizing ──> completed
            ├─> failed       ├─> expired
            ├─> expired      └─> cancelling ──> cancelled
            └─> cancelling
```"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.tenancy.tenants import BACKGROUND, FLEX

MINUTE = 60
HOUR = 3600
DAY = 86_400
MAX_WINDOW_SECONDS = 7 * DAY
MIN_WINDOW_SECONDS = MINUTE

URGENT_SHARE = 0.25
"""The last part of the completion window, in which a batch runs in the class flex instead of background."""

CLASSES = (BACKGROUND.name, FLEX.name)
"""The service classes that `service_class` chooses from."""

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


class BatchStatus(StrEnum):
    """The state of a batch, as in OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_S = BatchStatus

NEXT: dict[BatchStatus, frozenset[BatchStatus]] = {
    _S.VALIDATING: frozenset({_S.IN_PROGRESS, _S.FAILED, _S.EXPIRED, _S.CANCELLING}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.FAILED, _S.EXPIRED, _S.CANCELLING}),
    _S.FINALIZING: frozenset({_S.COMPLETED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""The states that may follow each state."""

OPEN = tuple(status for status, following in NEXT.items() if following)
"""States of batches that still have work to do."""


class FileRecord(NamedTuple):
    """A file's metadata; times are Unix seconds. Without ``expires_at``, it stays until it is deleted."""

    id: str
    tenant: str
    filename: str
    purpose: str
    nbytes: int
    created_at: int
    expires_at: int | None


class Totals(NamedTuple):
    """Lines of a batch that have ended, and the tokens that they used."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


NO_TOTALS = Totals()


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch.

    ``times`` has the Unix time at which each state began, by the state's name. ``window_seconds`` is the completion
    window, ``output_file_id`` and ``error_file_id`` are reserved when lines begin to run. ``has_output`` and
    ``has_errors`` say whether these files exist. ``output_seconds`` is the lifetime of both.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_seconds: int
    created_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    output_file_id: str = ""
    error_file_id: str = ""
    has_output: bool = False
    has_errors: bool = False
    total: int = 0
    totals: Totals = NO_TOTALS
    errors: tuple[dict[str, Any], ...] = ()

    @property
    def expires_at(self) -> int:
        """When the completion window ends."""
        return self.created_at + self.window_seconds

    def enter(self, status: BatchStatus, now: float, **changes: Any) -> BatchRecord:
        """The batch in its next state.

        Raises:
            ValueError: this state may not follow the current one.
        """
        if status not in NEXT[self.status]:
            raise ValueError(f"a batch that is {self.status} cannot become {status}")
        return replace(self, status=status, times={**self.times, status.value: int(now)}, **changes)

    def to_json(self) -> str:
        """The batch as JSON, for the store."""
        return json.dumps(asdict(self))


def batch_from_json(text: str) -> BatchRecord:
    """The batch that `BatchRecord.to_json` wrote."""
    values = json.loads(text)
    known = {each.name: values[each.name] for each in fields(BatchRecord) if each.name in values}
    known["status"] = BatchStatus(known["status"])
    known["totals"] = Totals(*known["totals"])
    known["errors"] = tuple(known["errors"])
    return BatchRecord(**known)


_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_UNITS = {"m": MINUTE, "h": HOUR, "d": DAY}


def window_seconds(text: str) -> int | None:
    """The seconds of a completion window such as 24h; None if it is invalid, too short or too long."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    return seconds if MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS else None


def service_class(batch: BatchRecord, now: float) -> str:
    """The service class of a batch's lines: background, or flex near the end of the completion window."""
    urgent = now >= batch.expires_at - URGENT_SHARE * batch.window_seconds
    return FLEX.name if urgent else BACKGROUND.name
