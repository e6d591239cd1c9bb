"""The engine from its options: pool, policies, knobs. No torch: a simulated runner gets the very same engine."""

from __future__ import annotations

from headrace.config import CacheOptions, ConfigError, SchedulerOptions
from headrace.core.blocks import BlockPool
from headrace.core.classes import CLASSES
from headrace.core.cost import StepCost
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.eviction import LeastWorth
from headrace.core.knobs import Knobs
from headrace.core.ports import Runner
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous, StaticBatch
from headrace.core.scheduler.fair import FairQueue, single_file
from headrace.core.scheduler.line import SlackLine
from headrace.core.scheduler.order import ByAge, ByPriority, FirstComeFirstServed, OrderPolicy
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.share import Books
from headrace.core.scheduler.victims import LastRanked
from headrace.observe.recording.engine import RecordedEngine, Tell

BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Default of ``--max-num-batched-tokens``: enough to fill the matrix units, little enough to keep steps short."""

OVERLAP = {"cpu": 0, "cuda": 1}
"""Default of ``--overlap``: on a CPU planning would only take a core, and the interpreter, from computing."""


def make_engine(
    plans: SchedulerOptions,
    cache: CacheOptions,
    runner: Runner,
    *,
    num_blocks: int,
    max_model_len: int,
    knobs: Knobs,
    cost: StepCost,
    overlap: int,
    tell: Tell | None = None,
) -> Engine:
    """An engine over ``num_blocks`` blocks of the device, with the policies that the options name.

    ``tell`` is told of all that goes in and comes out: a recording.
    """
    events: list[Event] = []
    scheduler = Scheduler(
        BlockPool(
            num_blocks, cache.block_size, LeastWorth(num_blocks, cache.block_size, cost), events.append
        ),
        _queue(plans),
        _order(plans),
        _admission(plans),
        LastRanked(),
        events,
        max_num_seqs=plans.max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=cache.enable_prefix_caching,
        cost=cost,
    )
    if tell is not None:
        return RecordedEngine(scheduler, runner, events, knobs, overlap, tell)
    return Engine(scheduler, runner, events, knobs, overlap)


def make_knobs(plans: SchedulerOptions, device: str, max_model_len: int) -> Knobs:
    """The bounds of a step on a kind of device (``cpu`` or ``cuda``).

    Raises:
        ConfigError: bounds under which not everybody could run.
    """
    tokens = plans.max_num_batched_tokens
    if tokens is None:
        tokens = max(BATCHED_TOKENS[device], plans.max_num_seqs)
        if not plans.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    elif tokens < plans.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {plans.max_num_seqs}: "
            "not all running sequences could decode in one step"
        )
    elif not plans.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens}: without chunked prefill a step must hold a whole prompt, "
            f"up to --max-model-len {max_model_len}"
        )
    return Knobs(
        batched_tokens=tokens,
        chunked_prefill=plans.enable_chunked_prefill,
        long_prefill_tokens=plans.long_prefill_token_threshold,
        mixed_prefill_ratio=plans.mixed_prefill_ratio,
    )


def resolve_overlap(plans: SchedulerOptions, device: str) -> int:
    """Steps in flight while the next is planned: as asked for, or what pays on this kind of device."""
    return OVERLAP[device] if plans.overlap is None else plans.overlap


def _queue(plans: SchedulerOptions) -> FairQueue:
    if plans.scheduling_policy == "fair":
        return FairQueue(Books(CLASSES, {}), SlackLine)
    return single_file()


def _order(plans: SchedulerOptions) -> OrderPolicy:
    if plans.scheduling_policy == "fair":
        return ByAge()
    return ByPriority() if plans.scheduling_policy == "priority" else FirstComeFirstServed()


def _admission(plans: SchedulerOptions) -> AdmissionPolicy:
    if plans.scheduling_policy == "static":
        return StaticBatch(plans.max_num_seqs, plans.static_batch_timeout)
    return Continuous()
