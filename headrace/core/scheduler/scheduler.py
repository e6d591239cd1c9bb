"""The scheduler: it plans each step from the live sequences, and commits the output of each step as events.

```
 plan    expire deadlines -> preempt -> decode rows -> started prompts -> admissions   => StepPlan
 commit  confirm what was computed -> append tokens -> make blocks findable -> finish  => events
```
Its choices are policies (shares, order, admission, victims, eviction). It does not know tensors, text or clocks. A
sequence may have rows in flight when it is preempted or finished. Its epoch marks those rows as stale, and its blocks
stay fenced until the last of them has been committed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from headrace.core.capacity import NO_WINDOWS, why_unservable
from headrace.core.drafting.proposal import Drafter
from headrace.core.events import (
    ChunkReason,
    Emitted,
    EngineLost,
    Event,
    Finished,
    LostPart,
    PreemptReason,
    SkipReason,
    arrival,
)
from headrace.core.images import unsplit
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.block_table import BlockTables
from headrace.core.memory.state_saves import StateSaves
from headrace.core.plan import StepOutput, StepPlan, new_tuple
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.memory_peak import RoomPolicy
from headrace.core.prediction.step_curve import TOKENS_ONLY, StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, PolicyFailed, by_share
from headrace.core.queueing.order import OrderPolicy, ask_rank
from headrace.core.recovery import MOST_LOSSES_OF_REQUEST
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler.admission import AdmissionPolicy
from headrace.core.scheduler.admitter import TPOT_SHARE, Admitter
from headrace.core.scheduler.drafted_rows import DraftedRows
from headrace.core.scheduler.holds import HoldPolicy, NoHolds
from headrace.core.scheduler.other_work import OtherWork
from headrace.core.scheduler.running_set import RunningSet
from headrace.core.scheduler.start_estimate import StartEstimate, estimate_start
from headrace.core.scheduler.step_builder import LONG_PROMPT_SHARE, StepBuilder
from headrace.core.scheduler.victims import VictimPolicy
from headrace.core.sequence import Sequence, Status


class Stalled(AssertionError):
    """A request waits, nothing runs, and no step or event is due: a bug, raised at once instead of idling for ever."""


class Scheduler:
    """Plans steps over a block pool and a fixed number of slots.

    Args:
        pool: the blocks of the device. It must write its events to the same list.
        queue: the waiting requests, ordered by share.
        order, admission, victims, room: the policies.
        events: the list to which all events are appended.
        max_num_seqs: number of slots, and so the maximum number of running sequences.
        max_model_len: maximum tokens of a sequence, prompt plus output.
        prefix_caching: whether equal prefixes share computed blocks.
        cost: relative cost of rows. It is used for the shares and, until ``times`` is ready, for
            `Knobs.mixed_prefill_ratio`.
        predictions: predicted start times and lengths. Without them latency targets are ignored and no deadline is
            rejected early.
        times: learns the duration of steps. It is ignored where ``predictions`` are given, which have their own.
        holds: what requests wait for outside the engine.
        drafter: chooses the drafts that decode rows verify; None: there are none.
    """

    def __init__(
        self,
        pool: BlockPool,
        queue: FairQueue,
        order: OrderPolicy,
        admission: AdmissionPolicy,
        victims: VictimPolicy,
        room: RoomPolicy,
        events: list[Event],
        *,
        max_num_seqs: int,
        max_model_len: int,
        prefix_caching: bool = True,
        cost: StepCost = TOKENS_ONLY,
        predictions: LatestStarts | None = None,
        times: StepTimes | None = None,
        holds: HoldPolicy | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.pool, self.max_model_len, self._order = pool, max_model_len, order
        states = StateSaves(pool, pool.checkpoints, events.append) if pool.checkpoints is not None else None
        self.tables = BlockTables(pool, prefix_caching, states)
        self._running = RunningSet(self.tables, victims, room, queue, events, max_num_seqs)
        self.drafter = drafter
        self._drafted = DraftedRows(drafter, self._running, events)
        self._cost, self._predictions = cost, predictions
        self._times = times if predictions is None else predictions.times
        self._events = events
        self.live: dict[str, Sequence] = {}  # all open requests by id; others only read it
        self._waiting = queue
        self._admitter = Admitter(queue, self._running, admission, holds or NoHolds(), predictions, events)
        self._deadlines: list[tuple[float, str]] = []
        self._launched: deque[tuple[StepPlan, StepBuilder]] = deque()
        self._collected: StepBuilder | None = None  # the step whose duration is being measured
        self._first_tokens: list[Sequence] = []  # sequences whose first token has just been sampled
        self._step, self._last_rows, self._arrivals = 0, 1, 0
        self.other_work = OtherWork()

    # -- requests in ---------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Add a request. A request that could never be served ends at once, with the reason."""
        self._events.append(arrival(request))
        problem = self._why_not(request)
        reason = FinishReason.REJECTED
        if not problem and self._predictions is not None and request.deadline is not None:
            problem = self._predictions.unreachable(request, now, self.tables.cached_estimate(request))
            reason = FinishReason.UNREACHABLE
        if not problem:
            self._arrivals += 1
            try:
                rank = ask_rank(self._order, request, self._arrivals)
            except Exception as error:  # a failing policy must not end other requests
                problem = f"the order policy failed: {type(error).__name__}: {error}"
                reason = FinishReason.FAILED
        if problem:
            self._events.append(Finished(request.id, reason, len(request.tokens), 0, 0, problem))
            return
        sequence = Sequence(request, rank, self.max_model_len)
        if self._predictions is not None:
            slo = self._predictions.slo(request)
            sequence.prompt_seconds = self._predictions.prefill_seconds(sequence.prompt_tokens)
            sequence.latest_start = self._predictions.latest_start(request, slo)
            sequence.tpot_seconds = slo.tpot_seconds or math.inf
        self.live[request.id] = sequence
        self._waiting.enter(sequence)
        self.tables.want(sequence)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        if request.answered and (ended := sequence.finish_reason()) is not None:
            self._finish(sequence, ended, stop_token=sequence.stop_token(ended))

    def _why_not(self, request: Request) -> str:
        if request.id in self.live:
            return f"request id {request.id!r} is already in use"
        if not self._waiting.knows(request.service_class):
            return f"there is no class of service {request.service_class!r}"
        pool, windows = self.pool, NO_WINDOWS if self.pool.windows is None else self.pool.windows.groups
        return why_unservable(request, self.max_model_len, pool.num_blocks, pool.block_size, windows)

    def cancel(self, request_id: str, why: FinishReason) -> None:
        """End a request now, in any state; an unknown or finished id is ignored."""
        if (sequence := self.live.get(request_id)) is not None:
            self._finish(sequence, why)

    def lose_memory(self, message: str, again: bool) -> None:
        """The content of all blocks is lost: preempt the requests that hold some, or fail them.

        They fail if ``again`` is false, or if they have lost it too often.
        """
        sequences, recomputed = self._running.all_sequences, 0
        for sequence in sequences:
            sequence.losses += 1
            if again and sequence.losses <= MOST_LOSSES_OF_REQUEST:
                self._running.preempt(sequence, PreemptReason.LOST)
                recomputed += 1
            else:
                self._finish(sequence, FinishReason.FAILED, message)
        self._events.append(EngineLost(LostPart.RANK, message, recomputed, len(sequences) - recomputed))

    def suspend(self) -> None:
        """Preempt every running request, and forget what device and host have; no step may be in flight."""
        for sequence in self._running.all_sequences:
            self._running.preempt(sequence, PreemptReason.SLEEP)
        self.tables.lost()
        self._collected = None
        self._first_tokens.clear()

    # -- queries -------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters of all sequences that hold slots."""
        return frozenset(sequence.request.adapter for sequence in self._running.all_sequences)

    def wake_at(self) -> float:
        """The time at which there is something to plan: ``-inf`` means now, ``inf`` never."""
        if self._running or (self._running.num_paused and not self._waiting.foreground):
            return -math.inf
        while self._deadlines and self._deadlines[0][1] not in self.live:
            heapq.heappop(self._deadlines)
        due = self._deadlines[0][0] if self._deadlines else math.inf
        if self._waiting:
            due = min(due, self._admitter.ready_at())
        return due

    def estimate_start(self, request_id: str, chunk_tokens: int) -> StartEstimate | None:
        """Position and predicted start of a waiting request; None for any other request."""
        sequence = self.live.get(request_id)
        if sequence is None or sequence.status is Status.RUNNING:
            return None
        return estimate_start(sequence, self._waiting, self._running, self._predictions, chunk_tokens)

    def room(self, knobs: Knobs) -> float:
        """Seconds that other work may take before the next step; ``inf`` if nothing runs."""
        step = self._collected if self._running else None
        waits = bool(self._waiting and self._running.free_slots)
        return math.inf if step is None else self.other_work.room(step, knobs.mixed_prefill_ratio, waits)

    # -- planning ----------------------------------------------------------------------------------

    def plan(self, now: float, knobs: Knobs) -> StepPlan:
        """The next step: rows within ``knobs.batched_tokens``, decode before prefill."""
        # 1. End what is too late, and learn from the first tokens of the step before.
        self._expire(now)
        if self._drafted.in_flight:
            # How many drafts are right is not known yet, and so neither are the next positions: plan nothing.
            return StepBuilder(self._step, 0, self._cost, now).freeze()
        self.tables.advance(now)
        self._observe_first_tokens(now)
        # 2. Give slots and blocks back to those that are owed them.
        self._preempt_for_head(now)
        # 3. Decode rows first: a token of each costs little, because the step reads all weights anyway.
        step = StepBuilder(self._step, knobs.batched_tokens, self._cost, now, not self._waiting.foreground)
        step.row_cost = self._cost.fixed_tokens / self._last_rows
        step.spent_seconds = self.other_work.take()
        if self._times is not None and step.idle:
            step.limit_background(self._times)
        prefills = self._plan_decodes(step, knobs)
        # 4. Prompts that have started, by share. A request that has been served less goes before each of them.
        #    One long prompt goes last: the others need not wait for it, and a part of the budget is reserved for it.
        long = self._longest(prefills, knobs)
        step.fraction = 1.0 if long is None else 1.0 - LONG_PROMPT_SHARE
        for sequence in sorted(prefills, key=by_share):
            if sequence is not long:
                self._admit(step, now, knobs, before=sequence)
                self._plan_prefill(step, sequence, knobs)
        # 5. New requests, in what is left of the budget.
        self._admit(step, now, knobs)
        if long is not None:
            step.fraction = 1.0
            self._plan_prefill(step, long, knobs)
        # 6. Freeze the plan. An empty one is not launched; then something must be in flight or due.
        self._running.planned(step)
        step.moves += self.tables.take_moves()
        step.placed = self.tables.take_placed()
        step.waits = not step.rows and not self._launched and self.tables.restoring
        plan = step.freeze()
        if plan.has_work:
            self._step += 1
            self._launched.append((plan, step))
            self._drafted.in_flight += bool(step.drafts)
            self._last_rows = len(plan.rows) or self._last_rows
        elif not self._launched:
            self._ensure_liveness(now)
        return plan

    def _admit(self, step: StepBuilder, now: float, knobs: Knobs, before: Sequence | None = None) -> None:
        """Start waiting requests; a failing policy ends the request that it failed for, and no other one."""
        while True:
            try:
                return self._admitter.admit(step, now, knobs, before)
            except PolicyFailed as failed:
                self._finish(failed.sequence, FinishReason.FAILED, str(failed))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            if (sequence := self.live.get(request_id)) is not None and sequence.request.deadline == deadline:
                self._finish(sequence, FinishReason.TIMEOUT)

    def observe_step(self, seconds: float) -> None:
        """Record the duration of the step that was committed last."""
        step = self._collected
        if step is not None and self._times is not None:
            self._drafted.observed(step, seconds)
            self.other_work.observe(step, seconds)
            self._times.observe(len(step.rows), step.tokens, step.contexts, seconds, bool(step.drafts))

    def _observe_first_tokens(self, now: float) -> None:
        if self._predictions is not None:
            for sequence in self._first_tokens:
                computed = sequence.prompt_tokens - sequence.cached_tokens
                self._predictions.observe_first_token(computed, now - sequence.started)
        self._first_tokens.clear()

    def _preempt_for_head(self, now: float) -> None:
        try:
            self._running.preempt_for_head(now)
        except PolicyFailed as failed:
            self._finish(failed.sequence, FinishReason.FAILED, str(failed))

    def _plan_decodes(self, step: StepBuilder, knobs: Knobs) -> list[Sequence]:
        """Plan a row for each sequence that needs only its next token; return those that need prefill."""
        behind: list[Sequence] = []
        prefills = step.decode(self._running.due(knobs.turns), self.pool.block_size, self._grow, behind)
        prefills += [each for each in behind if not self._running.catch_up(each, step, self._grow)]
        step.prompts = len(prefills)
        head = self._waiting.peek(step.now)
        if head is not None and head.skip_reason is not SkipReason.NO_BLOCKS:  # else none can start
            step.prompts += min(len(self._waiting), self._running.free_slots)
        times = self._times if self._times is not None and self._times.ready else None
        self._drafted.add(step, times)
        if times is not None:
            step.predict(times)
            if self._predictions is not None:
                step.bound(knobs.step_seconds, TPOT_SHARE * step.tpot_seconds)
            often = step.spent_seconds > 0 or any(each.request.images for each in prefills)
            step.spent_seconds += self.other_work.left_free(step, knobs.mixed_prefill_ratio, often)
        return prefills

    def _plan_prefill(self, step: StepBuilder, sequence: Sequence, knobs: Knobs) -> None:
        # One that was preempted in this step, and started again in it, has its row already.
        if sequence.status is Status.RUNNING and sequence.last_step != step.number:
            # A sequence behind its state may lack the block of its newest token, which is then a decode row of its own.
            known = min(sequence.known, len(sequence.table) * self.pool.block_size)
            remaining = known - sequence.planned
            slow, images = self._waiting.may_slow_decoding(sequence), sequence.request.images
            length, reason = step.share(sequence.planned, remaining, knobs, slow, images)
            if not length and not knobs.chunked_prefill:  # split before chunking was disabled
                length = unsplit(images, sequence.planned, min(remaining, step.budget), remaining)
            if length:
                whole = length == remaining
                try:
                    self._admitter.add_chunk(step, sequence, length, ChunkReason.REST if whole else reason)
                except PolicyFailed as failed:
                    self._finish(failed.sequence, FinishReason.FAILED, str(failed))

    def _longest(self, prefills: list[Sequence], knobs: Knobs) -> Sequence | None:
        """The first prompt that needs several steps, if other prompts may run beside it."""
        if knobs.chunked_prefill and (len(prefills) > 1 or self._waiting):
            for sequence in prefills:
                if sequence.known - sequence.planned > knobs.batched_tokens // 2:
                    return None if self._waiting.may_slow_decoding(sequence) else sequence
        return None

    def _grow(self, sequence: Sequence, step: StepBuilder) -> bool:
        try:
            return self._running.grow(sequence, step)
        except PolicyFailed as failed:
            self._finish(failed.sequence, FinishReason.FAILED, str(failed))
            return False

    def _ensure_liveness(self, now: float) -> None:
        """When nothing is planned or in flight, fail a head that can never start; anything else is a stall."""
        if self._admitter.holding and not self._running:
            return
        head = self._waiting.peek(now)
        problem = "" if self._running or head is None else self._admitter.why_stuck(head, now)
        if head is not None and problem:
            self._finish(head, FinishReason.FAILED, problem)
        elif self._running or (self._waiting and (head is None or self.wake_at() <= now)):
            raise Stalled(f"{self.num_running} running, {self.num_waiting} waiting, nothing planned")

    # -- commit ------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput) -> None:
        """Commit the oldest launched plan with the output of its step."""
        # 1. Outputs arrive in the order of their plans.
        launched_plan, step = self._launched.popleft()
        if launched_plan is not plan or output.step != plan.step:
            raise ValueError(
                f"step {output.step} is committed, step {launched_plan.step} is the oldest in flight"
            )
        self._running.committed = plan.step
        self._drafted.in_flight -= bool(step.drafts)
        # 2. The rows. A step that was broken off has computed nothing: its rows are planned again.
        computed = bool(plan.rows) and not output.broken_off
        if output.broken_off:
            self._running.unplan(step)
        else:
            self._commit_rows(step, output)
            self._drafted.stepped(step)
        # 3. Now no row of this step can write any more: fenced blocks become free, and copies have arrived.
        self.tables.committed(plan)
        self.tables.arrived(output.arrivals)
        # 4. The step as an event. `observe_step` adds its duration, which is known only to the engine.
        self._collected = step if computed else None
        if computed:
            self._events.append(self._running.stepped(step))

    def _commit_rows(self, step: StepBuilder, output: StepOutput) -> None:
        """Apply what each row computed and sampled. This loop runs once per generated token."""
        events, firsts, size = self._events, self._first_tokens, self.pool.block_size
        failures, scores, logprobs = output.failures, output.prompt_logprobs, output.logprobs
        drafts, ahead, decodes = step.drafts, step.ahead, step.decodes
        lines = zip(step.sequences, step.epochs, step.lengths, step.samples, output.tokens, strict=True)
        for i, (sequence, epoch, length, samples, drawn) in enumerate(lines):
            if sequence.epoch != epoch:
                continue  # it was preempted or has ended since this row was planned
            if failures and i in failures:
                self._finish(sequence, FinishReason.FAILED, failures[i])
                continue
            # How many positions are valid: those before the first wrong draft, and that a recurrent state has passed.
            if drafts and i in drafts:
                length = self._drafted.settle(step, i, drawn)
            elif ahead and i in ahead:
                length -= ahead[i]
            sequence.computed = computed = sequence.computed + length
            if scores and i in scores and (event := sequence.prompt_scores(computed - length, scores[i])):
                events.append(event)
            reason = None
            if samples:
                sequence.pending -= 1
                tokens = sequence.tokens
                if len(tokens) == sequence.prompt_tokens:
                    firsts.append(sequence)
                sequence.extend(drawn)
                scored = logprobs.get(i, ()) if logprobs else ()
                events.append(new_tuple(Emitted, (sequence.request.id, drawn, scored)))
                if len(tokens) >= sequence.finish_length or tokens[-1] in sequence.end_tokens:
                    reason = sequence.finish_reason()
            # Full blocks become findable by others; of a prompt that ends here, also its last, partial block.
            tail = length > 1 and samples and i >= decodes
            if tail or computed // size > sequence.registered:
                self.tables.register(sequence, tail=tail)
            if reason is not None:
                self._finish(sequence, reason, stop_token=sequence.stop_token(reason))

    def _finish(
        self, sequence: Sequence, reason: FinishReason, message: str = "", stop_token: int | None = None
    ) -> None:
        waited = sequence.status is not Status.RUNNING
        if not waited:
            self._running.leave(sequence)
        self.tables.unwant(sequence)
        sequence.enter(Status.FINISHED)
        if self._predictions is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._predictions.observe_finish(sequence.request, sequence.output_tokens)
        self._waiting.end(sequence, waited)
        self._drafted.ended(sequence)
        del self.live[sequence.request.id]
        self._events.append(sequence.ended(reason, message, stop_token))

    # -- consistency -------------------------------------------------------------------------------

    def check_consistency(self) -> None:
        """Raise AssertionError unless blocks, references, slots and queues agree with each other."""
        self._running.check()
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting), f"{len(waiting)} wait, {len(self._waiting)} counted"
        running = len(self._running) + self._running.num_paused
        assert len(self.live) == len(waiting) + running, "a live request is nowhere"
