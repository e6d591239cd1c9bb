"""Admits waiting requests into the step that is being planned.

It takes requests from the queue in order and starts those that the admission policy, the step's budget and the free
blocks allow. Requests that do not fit are passed over: at most `LOOKAHEAD` in a step, plus `MAX_HELD` that are held. A
request that was passed over `Knobs.max_skips` times blocks all requests behind it.
"""

from __future__ import annotations

import math
import sys

from headrace.core.events import Chunked, ChunkReason, Event, Skipped, SkipReason
from headrace.core.knobs import Knobs
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.queueing.fair_queue import FairQueue, PolicyFailed, by_share
from headrace.core.scheduler.admission import AdmissionPolicy, Queue, ask_admission, ask_ready_at
from headrace.core.scheduler.holds import HOLD_SECONDS, HOLDS, WAITS_FOR_CONTENT, HoldPolicy, ask_hold
from headrace.core.scheduler.running_set import RunningSet
from headrace.core.scheduler.step_builder import StepBuilder
from headrace.core.sequence import Sequence

LOOKAHEAD = 8
"""Maximum number of requests passed over in one step because they do not fit; it bounds the planning time."""

MAX_HELD = 64
"""Maximum number of requests passed over in one step because they wait for something outside the engine."""

TPOT_SHARE = 0.8
"""Share of a TPOT target that a step may take; the rest covers prediction errors."""


class Admitter:
    """Starts waiting requests in the running set, while policies, budget and blocks allow it."""

    def __init__(
        self,
        waiting: FairQueue,
        running: RunningSet,
        policy: AdmissionPolicy,
        holds: HoldPolicy,
        predictions: LatestStarts | None,
        events: list[Event],
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._tables = running.tables
        self._policy = policy
        self._holds = holds
        self._predictions = predictions
        self._events = events
        self._now = -math.inf  # of the last plan
        self._max_running = sys.maxsize  # maximum number of running requests in this plan
        self._batch_seconds: float | None = None  # of the last plan
        self._held_at = math.nan  # the last time at which a request was held
        self._retry_at = math.inf  # when a held request may start

    def admit(self, step: StepBuilder, now: float, knobs: Knobs, before: Sequence | None = None) -> None:
        """Start requests while policies and step have room; ``before``: only those served less than it.

        Raises:
            PolicyFailed: a policy failed for a request, which waits in the queue again. End it and call this again.
        """
        self._now = now
        self._max_running = knobs.max_running or sys.maxsize
        self._batch_seconds = knobs.static_batch_seconds
        if not self._waiting or (before is not None and not self._waiting.is_behind(before, now)):
            return
        allowed = self._allowed(now)
        passed: list[Sequence] = []
        try:
            self._admit(step, knobs, before, allowed, passed)
        finally:
            # Those passed over go back in any case. They keep their ranks, so their order is what it was.
            for sequence in passed:
                self._waiting.push(sequence)
            for sequence in self._waiting.take_held():
                self._skip(sequence, SkipReason.KV_LIMIT)

    def _admit(
        self, step: StepBuilder, knobs: Knobs, before: Sequence | None, allowed: int, passed: list[Sequence]
    ) -> None:
        """Start at most ``allowed`` requests; those that do not fit are moved from the queue to ``passed``."""
        now, held = self._now, 0
        while len(passed) - held < LOOKAHEAD and held < MAX_HELD and not self._is_closed(allowed, now):
            # 1. The next request by shares and order. It counts only if it is served before ``before``.
            head = self._waiting.pop(now)
            if head is None:
                break
            if before is not None and by_share(head) >= by_share(before):
                self._waiting.push(head)
                break
            # 2. Whether it fits: hold, cached prefix, blocks, budget, in this order (the cheap questions first).
            try:
                reason = self._try_admit(head, step, knobs)
            except PolicyFailed:
                self._waiting.push(head)
                raise
            # 3. It has started: those passed over have been overtaken once more. After the last time, nothing may
            #    start before them, or a stream of small requests would starve a large one.
            if reason is None:
                allowed -= 1
                for sequence in passed:
                    sequence.skips += sequence.skip_reason not in WAITS_FOR_CONTENT
                if any(sequence.skips >= knobs.max_skips for sequence in passed):
                    break
                continue
            # 4. It does not fit: pass it over and look at the next one, unless none may pass it.
            passed.append(head)
            self._skip(head, reason)
            if reason in HOLDS:
                due = max(self._tables.poll_at(head), now + HOLD_SECONDS)
                self._retry_at = min(due, self._retry_at) if self.holding else due
                self._held_at = now
                held += 1
            elif head.skips >= knobs.max_skips:
                break
            if step.closed:
                break

    def add_chunk(self, step: StepBuilder, sequence: Sequence, length: int, reason: ChunkReason) -> None:
        """Plan ``length`` tokens of a prompt, or fewer up to a checkpoint or for lack of blocks; say why so many."""
        placed = self._running.chunk(sequence, step, length)
        if not placed:
            return
        if placed < length:
            length, reason = placed, ChunkReason.NO_BLOCKS
        computed, ahead = self._tables.chunk(sequence, length)
        if computed < length:
            length, reason = computed, ChunkReason.CHECKPOINT
        self._events.append(Chunked(sequence.request.id, sequence.planned, length, reason))
        if self._tables.windows is not None:
            self._tables.windows.add(sequence, length)
        step.add_chunk(sequence, length, ahead)
        self._tables.planned(sequence)

    def ready_at(self) -> float:
        """When to admit again, in seconds; now, if the admission policy fails."""
        try:
            due = ask_ready_at(self._policy, self._queue())
        except Exception:
            # The step that is due now calls the policy again, and fails the request that it failed for.
            return -math.inf
        return max(due, self._retry_at) if self.holding else due

    @property
    def holding(self) -> bool:
        """Whether the last plan met a request that waits for something outside the engine.

        It need not be the head any more: taking requests out and putting them back moves the shares of tenants on.
        """
        return self._held_at == self._now

    def why_stuck(self, head: Sequence, now: float) -> str:
        """Why the queue head would wait for ever although nothing runs; empty if it will not, or if unknown."""
        if head.skip_reason is SkipReason.NO_BUDGET:
            return f"{head.known} tokens do not fit in one step and may not be split"
        if head.skip_reason is SkipReason.BATCH_NOT_READY:
            try:
                due = ask_ready_at(self._policy, self._queue())
                if due <= now:
                    raise ValueError(f"it admits no request, though it announced that it would at {due}")
            except Exception as error:
                return str(PolicyFailed(head, "admission", error))
        return ""

    def _allowed(self, now: float) -> int:
        """How many requests the admission policy admits; if the policy fails, it fails for the queue head."""
        head = self._waiting.peek(now)
        if head is None:
            return 0
        try:
            return ask_admission(self._policy, self._queue(), now)
        except Exception as error:
            raise PolicyFailed(head, "admission", error) from error

    def _is_closed(self, allowed: int, now: float) -> bool:
        """Whether no request may start; then none is taken out, because asking must not change whose turn it is."""
        if allowed > 0 and self._running.free_slots and len(self._running) < self._max_running:
            return False
        head = self._waiting.peek(now)
        if head is not None:
            self._skip(head, SkipReason.BATCH_NOT_READY if allowed <= 0 else SkipReason.NO_SLOT)
        return True

    def _skip(self, sequence: Sequence, reason: SkipReason) -> None:
        if reason is not sequence.skip_reason:
            sequence.skip_reason = reason
            self._events.append(Skipped(sequence.request.id, reason))

    def _try_admit(self, sequence: Sequence, step: StepBuilder, knobs: Knobs) -> SkipReason | None:
        if step.closed:
            return SkipReason.NO_BUDGET
        if self._is_full(sequence, step):
            return SkipReason.STEP_FULL
        # Does it wait for something outside the engine, such as its grammar?
        held = ask_hold(self._holds, sequence)
        if held is SkipReason.NO_ADAPTER_PLACE and self._running.num_paused:
            self._running.preempt_paused()
            held = ask_hold(self._holds, sequence)
        if held is not None:
            return held
        # Which of its blocks are cached? It also waits if another request computes them, or a tier brings them.
        hit = self._tables.look_up(sequence)
        if isinstance(hit, SkipReason):
            return hit
        # Are there blocks for the others?
        if not self._running.has_room(sequence, hit):
            return SkipReason.NO_BLOCKS
        # How many of its tokens does this step compute? Behind the cached ones, so this is asked last.
        cached = hit.tokens(self._tables.pool.block_size)
        slow, images = self._waiting.may_slow_decoding(sequence), sequence.request.images
        length, reason = step.share(cached, sequence.known - cached, knobs, slow, images)
        if not length or not step.may_join(sequence.account.owner.terms, length):
            return SkipReason.NO_BUDGET
        self._running.start(sequence, hit, step)
        self.add_chunk(step, sequence, length, reason)
        return None

    def _is_full(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Whether one more decoding row would make steps exceed a TPOT target that they could otherwise meet."""
        target = TPOT_SHARE * min(step.tpot_seconds, sequence.tpot_seconds)
        if target == math.inf or self._predictions is None or not self._predictions.times.ready:
            return False
        curve, rows = self._predictions.times.curve, len(self._running) + 1
        alone = curve.seconds(1, sequence.known)
        together = curve.seconds(rows, step.decode_contexts + sequence.known)
        return alone < target < together

    def _queue(self) -> Queue:
        head = self._waiting.peek(self._now)
        oldest = head.request.arrived if head else math.inf
        running = len(self._running)
        return Queue(len(self._waiting), oldest, running, self._running.admissions, self._batch_seconds)
