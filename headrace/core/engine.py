"""The engine loop: plan, launch, collect, commit, events. It is the same in production, in tests and in the
simulator.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.memory.lower_tier import Saved
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.ports import Runner, RunnerLost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.recovery import Recovery
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.start_estimate import StartEstimate
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.kv_limits import KvBounds
from headrace.core.tenancy.tenants import ClassShare

NO_STEP = -1
"""The step number of a plan that the scheduler did not make."""

SAVE_PATIENCE = 200
"""How often in a row a runner may report no finished copy to disk before saving stops."""


class Engine:
    """Drives a scheduler and a runner; the calling code passes the time and receives the events.

    ``overlap`` is the number of launched steps that may be uncollected while the next one is planned: 0 is
    the simple engine, 1 hides planning behind the device. ``events`` is the list that the scheduler and its
    pool write to. ``shares`` is the ledger of the scheduler's queue, where tenants have weights. ``times`` is what
    the scheduler has learnt about the duration of steps.
    """

    asleep = False
    shares: ShareLedger | None = None
    times: StepTimes | None = None

    def __init__(
        self, scheduler: Scheduler, runner: Runner, events: list[Event], knobs: Knobs, overlap: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.knobs = knobs
        self.runner = runner
        self._events = events
        self.overlap = overlap
        self._in_flight: deque[StepPlan] = deque()
        self._recovery = Recovery()
        self._stepped = 0.0  # the time of the last `step`
        self._since: float | None = None  # of the last `step`, if it committed a plan and requests still run
        self._launched: float | None = None  # of the only plan in flight, if the next one waits for it

    def submit(self, request: Request, now: float) -> None:
        """Take a request in. It ends in exactly one `Finished`, whatever happens."""
        self.scheduler.add(request, now)

    def cancel(self, request_id: str, why: FinishReason, now: float) -> None:
        """End a request at once. An unknown id is ignored: a request may finish before its cancellation arrives."""
        self.scheduler.cancel(request_id, why)

    def step(self, now: float) -> list[Event]:
        """Launch the next plan and commit the oldest one that is due; returns the events in order.

        An exception of the runner's `collect` is raised again. Every request with a row in flight has failed then,
        and nothing is in flight any more. After `RunnerLost` every running request waits to be computed again, or has
        failed (see `core.recovery`), nothing is cached, and the engine continues; what is on disk is found again.
        """
        if self.asleep:
            return self.take_events()
        self._stepped = now
        if self._since is not None:
            self.scheduler.observe_step(now - self._since)
            self._since = None
        plan = self.scheduler.plan(now, self.knobs)
        if plan.has_work:
            self.runner.launch(plan, now)
            self._in_flight.append(plan)
        if self._in_flight and (len(self._in_flight) > self.overlap or not plan.rows):
            if not self._commit_oldest():
                return self.take_events()
            if self.scheduler.num_running:  # called again at once: the time between is that step's
                self._since = now if plan.rows or self._launched is None else self._launched
            self._launched = None
        elif self._in_flight:  # the next plan needs its output, so its time begins with its own planning
            self._launched = now
        return self.take_events()

    def beside(self, work: Callable[[float], float]) -> None:
        """Between two steps, with none in flight: do other work. It gets the seconds that it may take, which it shares
        with prompts, and returns those that it took.
        """
        seconds = work(self.scheduler.room(self.knobs))
        self.scheduler.other_work.spent_seconds += seconds
        if self._since is not None:
            self._since += seconds

    def background(self, change: int) -> None:
        """Between two steps: so many works more (less, if negative) go on beside steps, and take cores from them."""
        self.scheduler.other_work.background += change

    def _commit_oldest(self) -> bool:
        """Collect and commit the oldest plan in flight; false if the runner was lost: then none is in flight any more.

        Raises:
            Exception: what the runner raised. Every request with a row in flight has failed then.
        """
        try:
            output = self.runner.collect()
        except RunnerLost as error:
            self._lose_memory(str(error))
            return False
        except Exception as error:
            self._fail_in_flight(str(error))
            raise
        self.scheduler.commit(self._in_flight.popleft(), output)
        return True

    def sleep(self, free: Callable[[], None] | None) -> None:
        """Between two steps: finish those in flight, and let requests wait until `wake_up`.

        ``free`` frees the memory of all keys and values, after running requests were preempted and the cache emptied.
        """
        while self._in_flight:
            self._commit_oldest()
        self._since = self._launched = None
        self.asleep = True
        if free is not None:
            self.scheduler.suspend()
            free()

    def wake_up(self) -> None:
        """Continue after `sleep`; waiting requests start with the next step."""
        self.asleep = False

    def _lose_memory(self, why: str) -> None:
        """Continue without what was in memory; the plans in flight have computed nothing."""
        self.scheduler.lose_memory(why, self._recovery.lost(self._stepped))
        for plan in self._drop_in_flight():
            self.scheduler.commit(plan, StepOutput(plan.step, ((),) * len(plan.rows), broken_off=True))
        self.scheduler.tables.lost()

    def _fail_in_flight(self, why: str) -> None:
        """Fail the requests of all plans in flight, because the oldest plan failed and the later ones build on it."""
        for plan in self._drop_in_flight():
            failures = dict.fromkeys(range(len(plan.rows)), why)
            self.scheduler.commit(plan, StepOutput(plan.step, ((),) * len(plan.rows), failures=failures))

    def _drop_in_flight(self) -> list[StepPlan]:
        """The plans in flight, which have no output: the oldest one failed, and the later ones build on it."""
        for _ in range(len(self._in_flight) - 1):
            with suppress(Exception):
                self.runner.collect()
        plans = list(self._in_flight)
        self._in_flight.clear()
        return plans

    def estimate_start(self, request_id: str) -> StartEstimate | None:
        """Position and predicted start of a waiting request; None for any other request."""
        return self.scheduler.estimate_start(request_id, self.knobs.batched_tokens)

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def wake_at(self, now: float) -> float | None:
        """When to call `step` next: ``now`` or later; None when only new requests can change anything."""
        if self._in_flight or self._events:
            return now
        if self.asleep:
            return None
        due = self.scheduler.wake_at()
        return None if due == math.inf else max(due, now)

    def save_cache(self, now: float) -> list[Saved]:
        """Copy the prefix cache to the disk tier at shutdown; returns what is stored there then.

        No request may be submitted any more. It ends early if the disk does not answer.
        """
        while self._in_flight:
            self.scheduler.commit(self._in_flight.popleft(), self.runner.collect())
        tables, patience = self.scheduler.tables, SAVE_PATIENCE
        for moves in tables.save():
            while (moves or tables.under_way) and patience:
                self.runner.launch(StepPlan(NO_STEP, (), tuple(moves), (), tables.under_way > 0), now)
                arrivals = self.runner.collect().arrivals
                tables.arrived(arrivals)
                moves, patience = [], SAVE_PATIENCE if arrivals else patience - 1
        return tables.saved()

    def adopt_cache(self, saved: list[Saved]) -> None:
        """Take over the disk tier of an earlier process; call it before the first step."""
        self.scheduler.tables.adopt(saved)

    def reset_prefix_cache(self, *, lower: bool = True) -> None:
        """Clear the prefix cache, including lower tiers unless ``lower`` is false; running requests continue."""
        self.scheduler.pool.reset(lower=lower)

    def retain(self, keys: Sequence[bytes], retention: int) -> None:
        """Set the retention priority of the cached blocks of these keys; between two steps."""
        self.scheduler.pool.retain(keys, retention)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Replace the tenants' weights (1 for a tenant that is not named); between two steps."""
        if self.shares is not None:
            self.shares.set_weights(weights)

    def set_kv_bounds(self, bounds: KvBounds) -> None:
        """Replace the bounds on the KV memory of tenants; between two steps."""
        if self.shares is not None:
            self.shares.set_kv_bounds(bounds)

    def set_class_shares(self, shares: Mapping[str, ClassShare]) -> None:
        """Replace weight and floor of some classes; between two steps."""
        if self.shares is not None:
            self.shares.set_class_shares(shares)

    def check_consistency(self) -> None:
        """Raise AssertionError unless all counts agree."""
        self.scheduler.check_consistency()
