"""What a server reads and changes of its engine beside requests, wherever the engine runs.

`LocalControls` belongs to an engine of this process. `RemoteControls` asks an engine process the same questions: each
method of `Questions` is one, and its type hints say how arguments and answer are packed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from headrace.core.drafting.prediction import CachedAnswerProposer
from headrace.core.drafting.suffix import ProposalCounts, SuffixProposer
from headrace.core.engine import Engine
from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import MeasuredSteps
from headrace.core.scheduler.start_estimate import StartEstimate
from headrace.core.tenancy.kv_limits import KvBounds
from headrace.core.tenancy.tenants import ClassShare
from headrace.observe.cache_metrics import LOOKUP_SECONDS, TimedPool
from headrace.observe.cost.prices import BY_TOKENS, Coefficients
from headrace.observe.engine_series import ExpertLoad
from headrace.observe.log import Level, set_level
from headrace.observe.metrics_page import Histogram
from headrace.observe.steps.record import Memory, current_memory
from headrace.response_cache.ports import PastOutputs
from headrace.service.engine_process import EngineProcess
from headrace.service.packing import Plain, packed, unpacked
from headrace.service.sleep import MemoryReport, Part
from headrace.wiring.drafting import proposer_of
from headrace.wiring.memory_sleep import SleepingMemory


class RunnerCounts(NamedTuple):
    """Totals of a runner since its start: see `compute.runner` and `fleet.leader`."""

    phase_seconds: Mapping[str, float]
    padding_tokens: int
    collective_bytes: Mapping[str, int]
    experts: ExpertLoad


class EngineCounts(NamedTuple):
    """What a server shows of its engine beside the events.

    ``coefficients`` are those of the learned step times, which are ``ready`` once enough steps have been observed.
    ``lookups`` are the times of lookups in the prefix cache: counts of buckets, and the sum. ``outputs`` are the sizes
    of the index of past outputs, if there is one. ``cpu_seconds`` is the CPU time of the process that counts.
    """

    runner: RunnerCounts
    cached_blocks: int
    coefficients: Coefficients
    ready: bool
    lookups: tuple[tuple[int, ...], float]
    outputs: ProposalCounts | None
    cpu_seconds: float


def _with_past(counts: EngineCounts, past: EngineCounts) -> EngineCounts:
    """Counts with the totals of an earlier process added."""
    runner, before = counts.runner, past.runner
    buckets, seconds = past.lookups
    return counts._replace(
        runner=runner._replace(
            phase_seconds=_sum(runner.phase_seconds, before.phase_seconds),
            padding_tokens=runner.padding_tokens + before.padding_tokens,
            collective_bytes=_sum(runner.collective_bytes, before.collective_bytes),
            experts=runner.experts._replace(tokens=runner.experts.tokens + before.experts.tokens),
        ),
        lookups=(tuple(map(add, counts.lookups[0], buckets)), counts.lookups[1] + seconds),
        cpu_seconds=counts.cpu_seconds + past.cpu_seconds,
    )


CountT = TypeVar("CountT", int, float)


def _sum(counts: Mapping[str, CountT], past: Mapping[str, CountT]) -> dict[str, CountT]:
    return {key: counts.get(key, 0) + past.get(key, 0) for key in (*past, *(counts.keys() - past.keys()))}


class Questions(Protocol):
    """Called between two steps."""

    def set_knobs(self, knobs: Knobs) -> None: ...

    def estimate_start(self, request_id: str) -> StartEstimate | None: ...

    def measured_steps(self) -> MeasuredSteps | None:
        """The step times that the engine has measured; None while they are too few, or if it measures none."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def retain(self, keys: Sequence[bytes], retention: int) -> None: ...

    def set_tenants(self, weights: Mapping[str, float], bounds: KvBounds) -> None: ...

    def set_class_shares(self, shares: Mapping[str, ClassShare]) -> None: ...

    def forget_outputs(self, tenant: str | None) -> None: ...

    def memory(self, request_id: str, copies: Mapping[str, int]) -> Memory: ...

    def sleep(self, parts: tuple[Part, ...]) -> MemoryReport: ...

    def wake_up(self, parts: tuple[Part, ...]) -> MemoryReport: ...

    def set_log_level(self, level: Level) -> None: ...


class Controls(Questions, Protocol):
    """The questions, and what may be read at any time. ``proposes_cached``: cached answers become drafts."""

    @property
    def knobs(self) -> Knobs: ...

    @property
    def overlap(self) -> int: ...

    @property
    def proposes_cached(self) -> bool: ...

    @property
    def outputs(self) -> PastOutputs | None: ...

    @property
    def counts(self) -> EngineCounts: ...

    @property
    def other_cpu_seconds(self) -> float:
        """CPU time of the engine in other processes than this one."""
        ...


class LocalControls:
    """`Controls` of an engine in this process; ``runner`` returns the counts of its runner, ``memory`` may sleep."""

    def __init__(self, engine: Engine, runner: Callable[[], RunnerCounts], memory: SleepingMemory) -> None:
        self._engine = engine
        self._runner = runner
        self.sleep, self.wake_up = memory.sleep, memory.wake_up
        drafter = engine.scheduler.drafter
        self.outputs = proposer_of(drafter, SuffixProposer)
        self.proposes_cached = proposer_of(drafter, CachedAnswerProposer) is not None
        self.overlap = engine.overlap
        self.other_cpu_seconds = 0.0

    @property
    def knobs(self) -> Knobs:
        return self._engine.knobs

    @property
    def counts(self) -> EngineCounts:
        times, pool, outputs = self._engine.times, self._engine.scheduler.pool, self.outputs
        lookups = pool.lookups if isinstance(pool, TimedPool) else Histogram(LOOKUP_SECONDS)
        return EngineCounts(
            self._runner(),
            pool.num_cached,
            BY_TOKENS if times is None else times.coefficients,
            times is not None and times.ready,
            (tuple(lookups.counts), lookups.total),
            None if outputs is None else outputs.counts,
            round(time.process_time(), 2),  # so that an idle engine has nothing new to send
        )

    def set_knobs(self, knobs: Knobs) -> None:
        self._engine.knobs = knobs

    def estimate_start(self, request_id: str) -> StartEstimate | None:
        return self._engine.estimate_start(request_id)

    def measured_steps(self) -> MeasuredSteps | None:
        times = self._engine.times
        return times.curve.measured() if times is not None and times.ready else None

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def retain(self, keys: Sequence[bytes], retention: int) -> None:
        self._engine.retain(keys, retention)

    def set_tenants(self, weights: Mapping[str, float], bounds: KvBounds) -> None:
        self._engine.set_tenant_weights(weights)
        self._engine.set_kv_bounds(bounds)

    def set_class_shares(self, shares: Mapping[str, ClassShare]) -> None:
        self._engine.set_class_shares(shares)

    def forget_outputs(self, tenant: str | None) -> None:
        if self.outputs is not None:
            self.outputs.forget(tenant)

    def memory(self, request_id: str, copies: Mapping[str, int]) -> Memory:
        scheduler = self._engine.scheduler
        return current_memory(scheduler.pool, scheduler.live, request_id, copies)

    def set_log_level(self, level: Level) -> None:
        set_level(level)


ResultT = TypeVar("ResultT")


class RemoteControls:
    """`Controls` of an engine process: questions wait for their answer, on the thread of a `call`."""

    def __init__(self, process: EngineProcess, knobs: Knobs, overlap: int, proposes_cached: bool) -> None:
        self._process = process
        self._seen: tuple[Plain, EngineCounts] | None = None
        self.knobs = knobs
        self.overlap = overlap
        self.proposes_cached = proposes_cached
        self.outputs = None if self.counts.outputs is None else _RemoteOutputs(process, self)

    @property
    def counts(self) -> EngineCounts:
        plain = self._process.counts
        if self._seen is None or self._seen[0] is not plain:
            counts = unpacked(EngineCounts, plain)
            for past in self._process.past_counts:
                counts = _with_past(counts, unpacked(EngineCounts, past))
            self._seen = plain, counts
        return self._seen[1]

    @property
    def other_cpu_seconds(self) -> float:
        return self.counts.cpu_seconds

    def set_knobs(self, knobs: Knobs) -> None:
        self._ask("set_knobs", knobs)
        self.knobs = knobs

    def estimate_start(self, request_id: str) -> StartEstimate | None:
        estimate: StartEstimate | None = self._ask("estimate_start", request_id)
        return estimate

    def measured_steps(self) -> MeasuredSteps | None:
        measured: MeasuredSteps | None = self._ask("measured_steps")
        return measured

    def reset_prefix_cache(self) -> None:
        self._ask("reset_prefix_cache")

    def retain(self, keys: Sequence[bytes], retention: int) -> None:
        self._ask("retain", keys, retention)

    def set_tenants(self, weights: Mapping[str, float], bounds: KvBounds) -> None:
        self._ask("set_tenants", weights, bounds)

    def set_class_shares(self, shares: Mapping[str, ClassShare]) -> None:
        self._ask("set_class_shares", shares)

    def forget_outputs(self, tenant: str | None) -> None:
        self._ask("forget_outputs", tenant)

    def memory(self, request_id: str, copies: Mapping[str, int]) -> Memory:
        memory: Memory = self._ask("memory", request_id, copies)
        return memory

    def sleep(self, parts: tuple[Part, ...]) -> MemoryReport:
        report: MemoryReport = self._ask("sleep", parts)
        return report

    def wake_up(self, parts: tuple[Part, ...]) -> MemoryReport:
        report: MemoryReport = self._ask("wake_up", parts)
        return report

    def set_log_level(self, level: Level) -> None:
        self._ask("set_log_level", level)

    def _ask(self, name: str, *arguments: Any) -> Any:
        hints = get_type_hints(getattr(Questions, name))
        answered = hints.pop("return")
        plain = [packed(hint, each) for hint, each in zip(hints.values(), arguments, strict=True)]
        return unpacked(answered, self._process.ask(name, *plain))


class _RemoteOutputs:
    """`PastOutputs` of an engine process."""

    def __init__(self, process: EngineProcess, controls: RemoteControls) -> None:
        self._process = process
        self._controls = controls

    @property
    def counts(self) -> ProposalCounts:
        counts = self._controls.counts.outputs
        assert counts is not None
        return counts

    def forget(self, tenant: str | None = None) -> None:
        self._process.call(lambda: self._controls.forget_outputs(tenant))


def answer(controls: LocalControls, name: str, arguments: Sequence[Plain]) -> Plain:
    """In the engine process: the answer to a question of `RemoteControls`."""
    hints = get_type_hints(getattr(Questions, name))
    answered = hints.pop("return")
    given = [unpacked(hint, each) for hint, each in zip(hints.values(), arguments, strict=True)]
    return packed(answered, getattr(controls, name)(*given))
