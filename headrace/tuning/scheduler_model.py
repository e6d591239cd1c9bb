"""An evaluation: the requests of a period run through a model of the scheduler, with other knobs.

The model has the scheduler's own bounds of a step. These and the times of steps come from the engine's measured curve.
It decodes first, and prefills in order of arrival within the bounds, but a prompt of several steps last. It knows no
caches, drafts, priorities or preemption, and no random numbers. All decoding rows are two sums, so a step costs
microseconds however many requests run.
"""

from __future__ import annotations

import heapq
import math
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Generator

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.core.scheduler.step_builder import LEAST_PREFILL, LONG_PROMPT_SHARE, mixed_limit, usual_limit
from headrace.tuning.traffic import Job, Outcome, Period

PART_STEPS = 1000
"""Steps that are modelled at a time, in about ten milliseconds."""

LOWEST_PRIORITY = 19


class _Prompt:
    """A prompt under way, computed up to ``position`` of ``goal``."""

    __slots__ = ("goal", "job", "position")

    def __init__(self, job: Job) -> None:
        self.job, self.position, self.goal = job, job.context, job.context + job.prompt


class _Step:
    """A step that is planned: ``decoding`` rows of these ``contexts``, and the chunks that are added.

    Its bounds are the scheduler's while so many ``prompts`` wait or run.
    """

    __slots__ = (
        "_budget",
        "_curve",
        "_decoding",
        "_knobs",
        "_prompts",
        "_seconds",
        "chunks",
        "contexts",
        "tokens",
    )

    def __init__(self, curve: StepCurve, knobs: Knobs, decoding: int, contexts: int, prompts: int) -> None:
        self._curve, self._knobs, self._decoding, self._prompts = curve, knobs, decoding, prompts
        self._budget, self._seconds = knobs.batched_tokens - decoding, curve.seconds(decoding, contexts)
        self.tokens, self.contexts = decoding, contexts
        self.chunks: list[tuple[_Prompt, int]] = []

    def add(self, prompt: _Prompt, share: float) -> bool:
        """Add the next chunk of a prompt within this share of what prefill may take; False if nothing is left.

        The first chunk of a step has a length even if the bounds leave no room.
        """
        curve, knobs, start = self._curve, self._knobs, prompt.position
        length = min(prompt.goal - start, self._budget - int(knobs.batched_tokens * (1.0 - share)))
        length = min(length, knobs.long_prefill_tokens or length)
        if self._decoding and knobs.mixed_prefill_ratio:
            limit = mixed_limit(self._seconds, knobs.mixed_prefill_ratio, self._prompts, share)
            fitting = curve.longest(start, limit, self.tokens, self.contexts)
            length = min(length, fitting or int(not self.chunks))
        if self._decoding and knobs.step_seconds:
            room = share * max(0.0, usual_limit(knobs.step_seconds, self._seconds) - self._seconds)
            fitting = curve.longest(start, self._seconds + room, self.tokens, self.contexts)
            length = min(length, fitting if self.chunks else max(fitting, LEAST_PREFILL))
        if length <= 0:
            return False
        self.chunks.append((prompt, length))
        self.tokens += length
        self.contexts += length * start + length * length // 2
        self._budget -= length
        return True


class SchedulerModel:
    """One run; ``slots`` bounds the running requests, ``curve`` is what the engine has learnt of step times.

    ``static``: requests start in static batches of all slots, or fewer after the batches' timeout. ``overlap`` is as
    in `Engine`: so many steps are under way when the next one is planned, and a request that arrives then is not in it.
    """

    def __init__(
        self,
        period: Period,
        knobs: Knobs,
        curve: StepCurve,
        slots: int,
        *,
        static: bool = False,
        overlap: int = 0,
    ) -> None:
        self._period, self._knobs, self._curve = period, knobs, curve
        self._slots = min(slots, knobs.max_running or slots)
        self._timeout = (knobs.static_batch_seconds or 0.0) if static else None
        self._joining = 0  # requests of a static batch that have not started yet
        self._now, self._step = period.began, 0
        self._under_way: deque[float] = deque(maxlen=overlap)  # when the last steps without a gap began
        self._waiting: deque[Job] = deque()
        self._prefilling: list[_Prompt] = []
        self._decoding = self._contexts = 0
        self._ends: list[tuple[int, int, float]] = []  # step, context and arrival of each decoding job's end
        self._inside = self._open = 0.0  # seconds that jobs were open, within the period and in all
        self._tokens = 0  # generated within the period
        self._first: list[tuple[float, int]] = []  # TTFT of each job, counted once
        self._steps: list[tuple[float, int]] = []  # seconds and decoding rows of each step
        self._inside_first = self._inside_steps = 0  # how many of these are within the period
        self._arriving = deque(period.jobs)

    def run(self, most_steps: float = math.inf) -> Outcome | None:
        """Go on for so many steps; None if jobs are still open then."""
        arriving, last = self._arriving, self._step + most_steps
        while arriving or self._waiting or self._prefilling or self._decoding:
            if self._step >= last:
                return None
            planned = self._under_way[0] if self._under_way else self._now
            while arriving and arriving[0].arrived <= planned:
                self._arrive(arriving.popleft())
            if self._startable() or self._prefilling or self._decoding:
                self._run_step()
            else:
                self._now = max(
                    self._now, min(arriving[0].arrived if arriving else math.inf, self._ready_at())
                )
                self._under_way.clear()
        return Outcome(
            self._inside / max(1, self._tokens),
            _p99(self._first[: self._inside_first]),
            _p99(self._steps[: self._inside_steps]),
            self._inside_steps,
            self._open,
            _p99(self._first),
            _p99(self._steps),
        )

    def _arrive(self, job: Job) -> None:
        if job.prompt:
            self._waiting.append(job)
        else:
            self._decode(job, job.context, job.output)

    def _startable(self) -> int:
        """How many waiting requests may start now."""
        running = self._decoding + len(self._prefilling)
        if self._timeout is None:
            return max(0, min(self._slots - running, len(self._waiting)))
        if not running and self._now >= self._ready_at():
            self._joining = min(self._slots, len(self._waiting))
        return self._joining

    def _ready_at(self) -> float:
        """When the next static batch starts, if nothing runs then."""
        if not self._waiting or self._timeout is None:
            return math.inf
        return -math.inf if len(self._waiting) >= self._slots else self._waiting[0].arrived + self._timeout

    def _run_step(self) -> None:
        chunks, seconds = self._plan()
        self._under_way.append(self._now)
        self._now += seconds
        self._step += 1
        self._steps.append((seconds, self._decoding))
        inside = self._now <= self._period.ended
        if inside:
            self._tokens += self._decoding
            self._inside_steps = self._step
        self._contexts += self._decoding
        while self._ends and self._ends[0][0] <= self._step:
            _, context, arrived = heapq.heappop(self._ends)
            self._decoding -= 1
            self._contexts -= context
            self._end(arrived)
        if chunks:
            for prompt, length in chunks:
                prompt.position += length
            self._emit_first()
            if inside:
                self._inside_first = len(self._first)

    def _plan(self) -> tuple[list[tuple[_Prompt, int]], float]:
        """The chunks of the prompts under way and of those that start now, and the seconds of the step."""
        startable = self._startable()
        step = _Step(
            self._curve, self._knobs, self._decoding, self._contexts, len(self._prefilling) + startable
        )
        long = self._longest()
        share = 1.0 if long is None else 1.0 - LONG_PROMPT_SHARE
        for prompt in self._prefilling:
            if prompt is not long and not step.add(prompt, share):
                break
        else:
            for _ in range(startable):
                prompt = _Prompt(self._waiting[0])
                if not step.add(prompt, share):
                    break
                self._waiting.popleft()
                self._prefilling.append(prompt)
                self._joining -= 1
        if long is not None:
            step.add(long, 1.0)
        return step.chunks, self._curve.seconds(step.tokens, step.contexts)

    def _longest(self) -> _Prompt | None:
        """The first prompt that needs several steps, if other prompts may run beside it, as in the scheduler."""
        if len(self._prefilling) > 1 or self._waiting:
            for prompt in self._prefilling:
                if prompt.goal - prompt.position > self._knobs.batched_tokens // 2:
                    return prompt
        return None

    def _emit_first(self) -> None:
        """The prompts that are complete have their first token."""
        left = []
        for prompt in self._prefilling:
            if prompt.position < prompt.goal:
                left.append(prompt)
                continue
            job = prompt.job
            self._first.append((self._now - job.arrived + job.waited, 1))
            self._tokens += self._now <= self._period.ended
            if job.output > 1:
                self._decode(job, prompt.goal + 1, job.output - 1)
            else:
                self._end(job.arrived)
        self._prefilling = left

    def _decode(self, job: Job, context: int, output: int) -> None:
        self._decoding += 1
        self._contexts += context
        heapq.heappush(self._ends, (self._step + output, context + output, job.arrived))

    def _end(self, arrived: float) -> None:
        self._open += self._now - arrived
        self._inside += max(0.0, min(self._now, self._period.ended) - arrived)


def evaluate(
    period: Period,
    knobs: Knobs,
    curve: StepCurve,
    slots: int,
    static: bool,
    overlap: int = 0,
    steps: int = PART_STEPS,
) -> Generator[None, None, Outcome]:
    """The outcome of a period; yields after every ``steps`` steps. As `evaluator.Evaluate`, in virtual time."""
    model = SchedulerModel(period, knobs, curve, slots, static=static, overlap=overlap)
    while (outcome := model.run(steps)) is None:
        yield
    yield
    return outcome


def _p99(weighted: list[tuple[float, int]]) -> float:
    """The 99th percentile of values that occur so many times each; 0 without any."""
    left = sum(count for _, count in weighted) // 100
    for value, count in sorted(weighted, reverse=True):
        left -= count
        if left < 0:
            return value
    return 0.0


def main() -> None:
    """Evaluate what the server sends, until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends with the server's pipe
    os.nice(LOWEST_PRIORITY)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            period, knobs, curve, slots, static, overlap = pickle.load(source)
        except EOFError:
            return
        outcome = SchedulerModel(period, knobs, curve, slots, static=static, overlap=overlap).run()
        pickle.dump(outcome, target)
        target.flush()


if __name__ == "__main__":
    main()
