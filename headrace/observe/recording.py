"""An engine that records its inputs and the events of each step; it behaves like `core.engine.Engine` otherwise.

The tokens of its runner and the proposals of its drafter are inputs, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from headrace.core.drafting.proposal import Drafter, DraftRow, Proposal, StepLoad
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.memory.lower_tier import Saved
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.ports import Runner
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler.scheduler import Scheduler
from headrace.observe.trace_file import (
    Adopted,
    Background,
    Cancelled,
    Drafts,
    Drained,
    Moment,
    Outcome,
    Raised,
    Reset,
    Spent,
    Submitted,
    Took,
    Turned,
)

# A drafter whose proposals are recorded, since a replay has no tokens to draft from.

DIGITS = 4
"""Digits of a recorded confidence. The recorded engine uses the rounded number, so that its replay does too."""


class RecordedDrafter:
    """A `core.drafting.proposal.Drafter` that behaves like ``inner`` and remembers what it returned."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self._calls = 0
        self._drafts = Drafts({})

    @property
    def seconds(self) -> Mapping[str, float]:
        """See `Drafter.seconds`."""
        return self.inner.seconds

    @property
    def idle(self) -> bool:
        """See `Drafter.idle`."""
        return self.inner.idle

    def draft(self, draft_rows: Sequence[DraftRow], load: StepLoad) -> Sequence[Proposal | None]:
        """See `Drafter.draft`."""
        with self._noted(0):
            drafts = self.inner.draft(draft_rows, load)
        if len(drafts) != len(draft_rows):
            return drafts  # the scheduler rejects it
        proposals = [
            each and _rounded(each, draft_row.max_tokens)
            for draft_row, each in zip(draft_rows, drafts, strict=True)
        ]
        self._drafts = Drafts(
            {
                draft_row.request.id: each
                for draft_row, each in zip(draft_rows, proposals, strict=True)
                if each
            },
            sum(self.seconds.values()) if load.times is not None else 0.0,
        )
        return proposals

    def next_draft_step(self, request: Request) -> int:
        """See `Drafter.next_draft_step`."""
        return self.inner.next_draft_step(request)

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """See `Drafter.observed`."""
        self.inner.observed(rows, drawn, seconds, drafted)

    def verified(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """See `Drafter.verified`."""
        self._calls += 1
        with self._noted(self._calls):
            self.inner.verified(request_id, proposal, accepted)

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Drafter.ended`."""
        self._calls += 1
        with self._noted(self._calls):
            self.inner.ended(request, tokens)

    def take(self) -> Drafts | None:
        """The drafter's activity since the last call; None if there was none."""
        drafts, self._drafts, self._calls = self._drafts, Drafts({}), 0
        return drafts if any(drafts) else None

    @contextmanager
    def _noted(self, call: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed = (call, type(error).__name__, str(error))
            self._drafts = self._drafts._replace(failed=failed)
            raise


def _rounded(proposal: Proposal, most: int) -> Proposal:
    """The proposal with rounded confidences, cut to the ``most`` tokens that can be used."""
    confidences = tuple(round(each, DIGITS) for each in proposal.confidences[:most])
    return proposal._replace(tokens=proposal.tokens[:most], confidences=confidences)


Tell = Callable[[Moment], None]
"""Records a moment without waiting."""


class RecordedEngine(Engine):
    """Calls ``tell`` with each input before it takes effect, and with each step after it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        events: list[Event],
        knobs: Knobs,
        overlap: int,
        tell: Tell,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._observed = _ObservedRunner(runner)
        super().__init__(scheduler, self._observed, events, knobs, overlap)
        self._tell = tell
        self._clock = clock
        self._recorded_knobs = knobs
        self._stepping = False
        drafter = scheduler.drafter
        self._drafts = drafter if isinstance(drafter, RecordedDrafter) else None

    def submit(self, request: Request, now: float) -> None:
        self._tell_knobs()  # the order of the queue may depend on them
        self._tell(Submitted(request, now))
        super().submit(request, now)

    def cancel(self, request_id: str, why: FinishReason, now: float) -> None:
        self._tell(Cancelled(request_id, why, now))
        super().cancel(request_id, why, now)

    def adopt_cache(self, saved: list[Saved]) -> None:
        self._tell(Adopted(len(saved)))
        super().adopt_cache(saved)

    def reset_prefix_cache(self, *, lower: bool = True) -> None:
        self._tell(Reset(lower))
        super().reset_prefix_cache(lower=lower)

    def beside(self, work: Callable[[float], float]) -> None:
        self._tell_knobs()  # the time that it may take depends on them

        def recorded(room: float) -> float:
            seconds = work(room)
            self._tell(Spent(seconds))
            return seconds

        super().beside(recorded)

    def background(self, change: int) -> None:
        self._tell(Background(change))
        super().background(change)

    def step(self, now: float) -> list[Event]:
        self._tell_knobs()
        began = self._clock()
        self._stepping = True
        try:
            events = super().step(now)
        except Exception as error:
            self._tell(Raised(now, f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._stepping = False
        seconds = self._clock() - began
        self._tell(Took(now, seconds, self._observed.take(), tuple(events), self._take_drafts()))
        return events

    def _tell_knobs(self) -> None:
        if self.knobs is not self._recorded_knobs:
            self._recorded_knobs = self.knobs
            self._tell(Turned(self.knobs))

    def _take_drafts(self) -> Drafts | None:
        return None if self._drafts is None else self._drafts.take()

    def take_events(self) -> list[Event]:
        events = super().take_events()
        if events and not self._stepping:
            self._tell(Drained(tuple(events)))
        return events


class _ObservedRunner:
    """A runner that stores the shape of its last output."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._outcome: Outcome | None = None

    def launch(self, plan: StepPlan, now: float) -> None:
        self._runner.launch(plan, now)

    def collect(self) -> StepOutput:
        output = self._runner.collect()
        self._outcome = Outcome(
            counts={i: len(tokens) for i, tokens in enumerate(output.tokens) if len(tokens) > 1},
            scores={i: len(scores) for i, scores in output.prompt_logprobs.items()},
            failures=dict(output.failures),
            arrivals=output.arrivals,
            broken_off=output.broken_off,
        )
        return output

    def take(self) -> Outcome | None:
        outcome, self._outcome = self._outcome, None
        return outcome
