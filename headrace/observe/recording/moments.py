"""What a recording is made of: everything that goes into an engine, in order, and each step with what it told.

Replaying the ways in with the recorded times through the same core gives the same events: a core has no clock and no
chance of its own, and what its runner answered is here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.plan import Arrival
from headrace.core.request import FinishReason, Request


class Begun(NamedTuple):
    """The engine was composed; ``settings`` are plain values from which it can be composed again."""

    version: str
    settings: Mapping[str, Any]


class Submitted(NamedTuple):
    """A request came."""

    request: Request
    now: float


class Cancelled(NamedTuple):
    """Somebody asked for a request's end."""

    request_id: str
    why: FinishReason
    now: float


class Turned(NamedTuple):
    """The next step goes by other knobs."""

    knobs: Knobs


class Adopted(NamedTuple):
    """So many blocks of an earlier engine's cache were taken over; what is in them no recording holds."""

    blocks: int


class Reset(NamedTuple):
    """The prefix cache was emptied, that of the lower tiers too if ``lower``."""

    lower: bool


class Outcome(NamedTuple):
    """What the runner returned of one step, in shape; the first three fields are keyed by a row's index.

    ``counts`` are numbers of drawn tokens where a row drew another number than one; ``scores`` numbers of scored
    prompt positions; ``failures`` messages; ``arrivals`` what had come from or gone to the disk; ``broken_off`` that no
    row was computed.
    """

    counts: Mapping[int, int]
    scores: Mapping[int, int]
    failures: Mapping[int, str]
    arrivals: tuple[Arrival, ...] = ()
    broken_off: bool = False


class Took(NamedTuple):
    """One call of `Engine.step`: when, how long it took, what was collected in it (None: nothing), what it told."""

    now: float
    seconds: float
    outcome: Outcome | None
    events: tuple[Event, ...]


class Drained(NamedTuple):
    """Events that were taken between two steps."""

    events: tuple[Event, ...]


class Raised(NamedTuple):
    """A step that ended the engine."""

    now: float
    error: str


Moment = Begun | Adopted | Submitted | Cancelled | Turned | Reset | Took | Drained | Raised
