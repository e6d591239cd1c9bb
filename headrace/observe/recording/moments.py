"""The entries of a trace: every input of an engine in order, and each step with its events.

Replaying the inputs at the recorded times produces the same events: the core has no clock and no randomness, and the
outputs of its runner are recorded too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.core.drafting.proposal import Proposal
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.plan import Arrival
from headrace.core.request import FinishReason, Request


class Begun(NamedTuple):
    """The engine was built; it can be rebuilt from ``settings``, which are plain values."""

    version: str
    settings: Mapping[str, Any]


class Submitted(NamedTuple):
    """A request was submitted."""

    request: Request
    now: float


class Cancelled(NamedTuple):
    """A request was cancelled."""

    request_id: str
    why: FinishReason
    now: float


class Turned(NamedTuple):
    """The scheduler's settings changed before the next step."""

    knobs: Knobs


class Adopted(NamedTuple):
    """Blocks of an earlier engine's cache were loaded; their content is not recorded."""

    blocks: int


class Reset(NamedTuple):
    """The prefix cache was emptied; also in the lower tiers if ``lower``."""

    lower: bool


class Spent(NamedTuple):
    """Other work took so many seconds of the prefill time of the next step."""

    seconds: float


class Outcome(NamedTuple):
    """The shape of the runner's output of one step; the first three fields are keyed by row index.

    ``counts`` are numbers of sampled tokens, for rows that did not sample exactly one. ``scores`` are numbers of scored
    prompt positions, ``failures`` error messages, ``arrivals`` finished disk transfers. ``broken_off``: the step was
    interrupted and computed no row.
    """

    counts: Mapping[int, int]
    scores: Mapping[int, int]
    failures: Mapping[int, str]
    arrivals: tuple[Arrival, ...] = ()
    broken_off: bool = False


class Drafts(NamedTuple):
    """The drafter's activity since the previous step: an input, because it may depend on tokens and clocks.

    ``proposals`` are by request. ``seconds`` of device time are not part of the step. ``failed`` is the call that
    raised an error (0: `draft`, else the number of the other call), the error's type and its message.
    """

    proposals: Mapping[str, Proposal]
    seconds: float = 0.0
    failed: tuple[int, str, str] | None = None


class Took(NamedTuple):
    """One call of `Engine.step`: its time, duration, collected output (None: nothing was collected) and events.

    ``drafts`` is None if nothing was drafted.
    """

    now: float
    seconds: float
    outcome: Outcome | None
    events: tuple[Event, ...]
    drafts: Drafts | None = None


class Drained(NamedTuple):
    """Events that were emitted between two steps."""

    events: tuple[Event, ...]


class Raised(NamedTuple):
    """A step raised an error, which ended the engine."""

    now: float
    error: str


Moment = Begun | Adopted | Submitted | Cancelled | Turned | Reset | Spent | Took | Drained | Raised
