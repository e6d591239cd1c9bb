"""Builds the engine from its options: pool, policies, knobs, cost ledger.

It does not import torch: the simulator runs the same engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from headrace.config import CacheOptions, ConfigError, CostOptions, Options, SchedulerOptions
from headrace.core.adapters import Adapters
from headrace.core.capacity import NO_WINDOWS, WindowGroups
from headrace.core.drafting.forced import ForcedTokens
from headrace.core.drafting.proposal import Drafter
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.checkpoints import Checkpoints
from headrace.core.memory.eviction import CostAwareEviction, EvictionPolicy, LeastRecentlyUsed
from headrace.core.memory.lower_tier import LowerTier
from headrace.core.memory.restore import Link, RestoreIfFaster
from headrace.core.memory.tiers import LowerTiers, PeerBlocks
from headrace.core.peers import Peers
from headrace.core.plan import Tier
from headrace.core.ports import Grammars, Runner
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.memory_peak import AlwaysFits, Headroom, RoomPolicy
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_curve import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue, single_queue
from headrace.core.queueing.order import (
    PATIENCE,
    ByPriority,
    FirstComeFirstServed,
    OrderPolicy,
    ShortestFirst,
)
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous, LongestPrefix, StaticBatch
from headrace.core.scheduler.holds import Every, HoldPolicy, UntilCompiled, UntilPlaced
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked, LowestRecomputeCost, VictimPolicy
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.kv_limits import NO_KV_BOUNDS, KvBounds
from headrace.core.tenancy.tenants import CLASSES, ServiceClass
from headrace.observe.cache_metrics import TimedPool
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import BadPrice, Coefficients, Pricing, TokenPrices, parse_device_price
from headrace.observe.recording import RecordedDrafter, RecordedEngine, Tell
from headrace.wiring.drafting import ModelDrafts, make_drafter, speculation
from headrace.wiring.plugins import Port, find_class, make_plugin

if TYPE_CHECKING:
    from headrace.compute.model.shape import ModelShape

# Selects the policies of an engine from its options: those of the scheduling policy, others by name, or plug-ins.

AUTO = "auto"
"""The policy that ``--scheduling-policy`` implies."""

ORDER = Port("--queue-order", "headrace.policies.order", OrderPolicy, (AUTO, "arrival", "prefix", "shortest"))
ADMISSION = Port(
    "--admission-policy", "headrace.policies.admission", AdmissionPolicy, (AUTO, "continuous", "static")
)
VICTIM = Port(
    "--victim-policy",
    "headrace.policies.victim",
    VictimPolicy,
    (AUTO, "last-ranked", "lowest-recompute-cost"),
)
EVICTION = Port("--eviction-policy", "headrace.policies.eviction", EvictionPolicy, ("cost-aware", "lru"))


def check_policies(plans: SchedulerOptions) -> None:
    """Find all policies, so that a wrong name is reported before a model is loaded.

    Raises:
        ConfigError: a policy does not exist or is not compatible.
    """
    for port, name in (
        (ORDER, plans.queue_order),
        (ADMISSION, plans.admission_policy),
        (VICTIM, plans.victim_policy),
        (EVICTION, plans.eviction_policy),
    ):
        if name not in port.built_in:
            find_class(port, name)
    if plans.queue_order in ("prefix", "shortest") and plans.scheduling_policy != "fair":
        raise ConfigError(
            f"--queue-order {plans.queue_order} needs --scheduling-policy fair; {plans.scheduling_policy} has its own "
            "order"
        )


def make_order(plans: SchedulerOptions, starts: LatestStarts, knobs: Callable[[], Knobs]) -> OrderPolicy:
    """The order within a queue; a plug-in is offered ``seconds``, the predicted time of a request that runs alone.

    ``knobs`` returns the engine's current ones.
    """
    if plans.queue_order not in ORDER.built_in:
        return cast(OrderPolicy, make_plugin(ORDER, plans.queue_order, seconds=starts.work_seconds))
    if has_patience(plans):
        return ShortestFirst(starts.work_seconds, lambda: knobs().queue_patience)
    return ByPriority() if plans.scheduling_policy == "priority" else FirstComeFirstServed()


def has_patience(plans: SchedulerOptions) -> bool:
    """Whether the order within a queue depends on `Knobs.queue_patience`."""
    return plans.scheduling_policy == "fair" and plans.queue_order in ORDER.built_in


def make_admission(plans: SchedulerOptions) -> AdmissionPolicy:
    """When requests may join the batch; a plug-in is offered ``size`` (`max_num_seqs`) and ``timeout`` in seconds."""
    size, timeout = plans.max_num_seqs, plans.static_batch_timeout
    if plans.admission_policy not in ADMISSION.built_in:
        return cast(
            AdmissionPolicy, make_plugin(ADMISSION, plans.admission_policy, size=size, timeout=timeout)
        )
    return StaticBatch(size, timeout) if is_static(plans) else Continuous()


def is_static(plans: SchedulerOptions) -> bool:
    """Whether requests join as static batches."""
    implied = "static" if plans.scheduling_policy == "static" else "continuous"
    return (implied if plans.admission_policy == AUTO else plans.admission_policy) == "static"


def make_victims(plans: SchedulerOptions, cost: StepCost, classes: Sequence[ServiceClass]) -> VictimPolicy:
    """Which sequence is preempted; a plug-in is offered ``cost`` and ``classes``, as `LowestRecomputeCost`."""
    if plans.victim_policy not in VICTIM.built_in:
        return cast(VictimPolicy, make_plugin(VICTIM, plans.victim_policy, cost=cost, classes=classes))
    implied = "lowest-recompute-cost" if plans.scheduling_policy == "fair" else "last-ranked"
    chosen = implied if plans.victim_policy == AUTO else plans.victim_policy
    return LowestRecomputeCost(cost, classes) if chosen == "lowest-recompute-cost" else LastRanked()


def make_eviction(plans: SchedulerOptions, num_blocks: int, context_blocks: float) -> EvictionPolicy:
    """Which block of a tier is evicted; a plug-in is offered ``num_blocks`` and ``context_blocks``."""
    if plans.eviction_policy not in EVICTION.built_in:
        offered = {"num_blocks": num_blocks, "context_blocks": context_blocks}
        return cast(EvictionPolicy, make_plugin(EVICTION, plans.eviction_policy, **offered))
    return (
        LeastRecentlyUsed()
        if plans.eviction_policy == "lru"
        else CostAwareEviction(num_blocks, context_blocks)
    )


BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Default of ``--max-num-batched-tokens``: enough to use the matrix units fully, few enough to keep steps short."""

OVERLAP = {"cpu": 0, "cuda": 1}
"""Default of ``--overlap``: on a CPU, planning in parallel would take a core and the interpreter from computing."""

DISK_SECONDS = 0.002
"""Latency of a fetch from the disk: the request waits for at least one more step."""

PEER_SECONDS = 0.002
"""Latency of a fetch from a peer: a round trip, and the request waits for at least one more step."""

PEER_BYTES_PER_SECOND = 1e9
"""Assumed bandwidth to peers, until it has been measured."""

PEER_BLOCKS = 1 << 16
"""Maximum number of peers' blocks that are tracked; they need no memory for contents."""

WATERMARK = 100
"""One in this many blocks is left free at the predicted peak."""

MAX_PASSES = 16
"""Maximum number of times that a request with a longer cached prefix may overtake the first one of a queue."""

FIXED_TOKENS = {"cpu": 8.0, "cuda": 256.0}
"""Tokens whose linear layers cost as much as the fixed part of a step: few on a CPU, which is compute-bound early."""

ATTENTION_PENALTY = {"cpu": 3.0, "cuda": 2.0}
"""Time of an operation of attention relative to one of a linear layer."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of the tiers below the device: their blocks, bytes per block, and bandwidth to the device."""

    host_blocks: int
    disk_blocks: int
    block_bytes: int
    host_bytes_per_second: float
    disk_bytes_per_second: float = 0.0


def make_engine(
    plans: SchedulerOptions,
    cache: CacheOptions,
    runner: Runner,
    *,
    num_blocks: int,
    windows: WindowGroups = NO_WINDOWS,
    max_model_len: int,
    knobs: Knobs,
    cost: StepCost,
    overlap: int,
    classes: Sequence[ServiceClass] = CLASSES,
    weights: Mapping[str, float] = MappingProxyType({}),
    kv_bounds: KvBounds = NO_KV_BOUNDS,
    tiers: TierSizes | None = None,
    state_cells: int | None = None,
    peers: Peers | None = None,
    tell: Tell | None = None,
    grammars: Grammars | None = None,
    drafts: ModelDrafts | None = None,
    forced: ForcedTokens | None = None,
    drafter: Drafter | None = None,
    adapters: Adapters | None = None,
) -> Engine:
    """An engine over ``num_blocks`` blocks of the device, with the policies that the options name.

    ``classes``, ``weights`` of tenants and ``kv_bounds`` are for the policy ``fair``. ``tiers`` store evicted blocks,
    ``peers`` have more. ``state_cells`` counts the checkpoints of states (None: no states). With ``windows`` a block
    is that of one group of layers. ``tell`` records, ``grammars`` compile. ``drafts`` are a draft model's, ``forced``
    from grammars; ``drafter`` replaces all.
    """
    events: list[Event] = []
    fair, by_name = plans.scheduling_policy == "fair", {each.name: each for each in classes}
    predictions = LatestStarts(StepTimes(cost), LengthPredictor(max_model_len), by_name)
    shares, size = ShareLedger(classes, weights, kv_bounds), cache.block_size
    eviction = partial(make_eviction, plans, context_blocks=cost.context_tokens / size)
    lower = _lower_tiers(tiers, peers, size, eviction, predictions.times, events.append) if tiers else None
    states = _checkpoints(state_cells, cache, eviction, events.append)
    pool = TimedPool(num_blocks, size, eviction(num_blocks), events.append, lower, states, windows)
    scheduler = Scheduler(
        pool,
        FairQueue(shares, _line(plans, cache, pool)) if fair else single_queue(),
        make_order(plans, predictions, lambda: engine.knobs),
        make_admission(plans),
        make_victims(plans, cost, classes),
        _room(plans, predictions, cache, num_blocks, windows),
        events,
        max_num_seqs=plans.max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=cache.enable_prefix_caching,
        cost=cost,
        predictions=predictions if fair else None,
        times=predictions.times,
        holds=_holds(grammars, adapters, lambda: engine.scheduler.adapters),
        drafter=_drafter(drafter or make_drafter(plans, drafts, forced), tell),
    )
    made = scheduler, runner, events, knobs, overlap
    engine: Engine = Engine(*made) if tell is None else RecordedEngine(*made, tell)
    engine.shares, engine.times = shares if tell is None else None, predictions.times
    return engine


def _holds(
    grammars: Grammars | None, adapters: Adapters | None, used: Callable[[], frozenset[str]]
) -> HoldPolicy | None:
    """What requests wait for outside the engine; ``used`` are the adapters of those that run."""
    holds: list[HoldPolicy] = [] if grammars is None else [UntilCompiled(grammars)]
    if adapters is not None:
        holds.append(UntilPlaced(adapters, used))
    return Every(*holds) if holds else None


def _checkpoints(
    cells: int | None,
    cache: CacheOptions,
    eviction: Callable[[int], EvictionPolicy],
    emit: Callable[[Event], None],
) -> Checkpoints | None:
    if cells is None:
        return None
    return Checkpoints(cells, cache.state_cache_interval, eviction(cells), emit)


def _drafter(drafter: Drafter | None, tell: Tell | None) -> Drafter | None:
    return RecordedDrafter(drafter) if drafter is not None and tell is not None else drafter


def _lower_tiers(
    sizes: TierSizes,
    peers: Peers | None,
    block_size: int,
    eviction: Callable[[int], EvictionPolicy],
    times: StepTimes,
    tell: Callable[[Event], None],
) -> LowerTiers:
    def tier(which: Tier, blocks: int) -> LowerTier:
        return LowerTier(which, blocks, eviction(blocks))

    links = {Tier.HOST: Link(0.0, sizes.host_bytes_per_second)}
    if sizes.disk_blocks:
        links[Tier.DISK] = Link(DISK_SECONDS, sizes.disk_bytes_per_second)
    if peers is not None:
        links[Tier.PEER] = Link(PEER_SECONDS, PEER_BYTES_PER_SECOND)
    return LowerTiers(
        tier(Tier.HOST, sizes.host_blocks),
        tier(Tier.DISK, sizes.disk_blocks) if sizes.disk_blocks else None,
        RestoreIfFaster(times, block_size, sizes.block_bytes, links),
        block_size=block_size,
        block_bytes=sizes.block_bytes,
        emit=tell,
        peers=PeerBlocks(tier(Tier.PEER, PEER_BLOCKS), peers) if peers is not None else None,
    )


def check_states(options: Options, shape: ModelShape) -> None:
    """Raise ConfigError for an option that has no effect on this model, or that needs states where none are saved."""
    check_checkpoints(options.cache, shape.architecture, stateful=bool(shape.state_bytes))
    if shape.state_bytes:
        _check_others(options, shape.architecture)


def check_checkpoints(cache: CacheOptions, name: str, *, stateful: bool) -> None:
    """Raise ConfigError for options on checkpoints where there are none: the model of this ``name`` is not
    ``stateful``, or prefixes are not cached.
    """
    if stateful and cache.enable_prefix_caching:
        return
    why = "prefix caching is disabled" if stateful else f"{name} has no recurrent states"
    given = {
        "state-cache-bytes": bool(cache.state_cache_bytes),
        "state-cache-interval": cache.state_cache_interval != CacheOptions().state_cache_interval,
    }
    for name, changed in given.items():
        if changed:
            raise ConfigError(f"--{name}: {why}, so there are no checkpoints of states; omit this option")


def _check_others(options: Options, architecture: str) -> None:
    """Refuse what would need states that are not there."""
    if options.cache.kv_transfer_config:
        raise ConfigError(
            f"--kv-transfer-config: {architecture} keeps recurrent states, which are not sent to other servers; omit"
            " this option"
        )
    drafting = speculation(options.scheduler)
    if drafting is not None and drafting.has_head:
        raise ConfigError(
            f"--speculative-config: method eagle3 does not follow the recurrent states of {architecture}; use another"
            " method"
        )


def make_knobs(plans: SchedulerOptions, device: str, max_model_len: int, stages: int = 1) -> Knobs:
    """The bounds of a step on a kind of device (``cpu`` or ``cuda``), or in a pipeline of such devices.

    Raises:
        ConfigError: with these bounds, some requests could not run.
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
        step_seconds=plans.max_step_seconds,
        static_batch_seconds=plans.static_batch_timeout,
        queue_patience=PATIENCE if plans.queue_order == "shortest" else 0.0,
        turns=resolve_overlap(plans, device, stages) + 1 if stages > 1 else 1,
    )


def resolve_overlap(plans: SchedulerOptions, device: str, stages: int = 1) -> int:
    """Number of steps in flight while the next is planned: as configured, or the default of this kind of device.

    A pipeline in which steps overlap has one for each of its stages.
    """
    overlap = OVERLAP[device] if plans.overlap is None else plans.overlap
    return stages - 1 if overlap and stages > 1 else overlap


def step_cost(linear_parameters: int, query_width: int, device: str) -> StepCost:
    """The relative cost of rows, from counted operations.

    A token's linear layers take two operations per weight. Its attention takes four per query element (of all layers)
    and position of context (q·k and weights·v).
    """
    return StepCost(
        FIXED_TOKENS[device], 2 * linear_parameters / (4 * query_width * ATTENTION_PENALTY[device])
    )


def _line(plans: SchedulerOptions, cache: CacheOptions, pool: BlockPool) -> Callable[[], TenantQueue]:
    if plans.queue_order in ("auto", "prefix") and cache.enable_prefix_caching:
        return lambda: TenantQueue(LongestPrefix(pool), MAX_PASSES)
    return TenantQueue


def _room(
    plans: SchedulerOptions,
    predictions: LatestStarts,
    cache: CacheOptions,
    num_blocks: int,
    windows: WindowGroups,
) -> RoomPolicy:
    if plans.scheduling_policy != "fair":
        return AlwaysFits()
    return Headroom(predictions.lengths, cache.block_size, watermark=num_blocks // WATERMARK, windows=windows)


def make_pricing(options: CostOptions) -> Pricing:
    """The prices of a server.

    Raises:
        ConfigError: the price of the device cannot be read.
    """
    try:
        per_second = 0.0 if options.device_price is None else parse_device_price(options.device_price)
    except BadPrice as error:
        raise ConfigError(f"--device-price: {error}") from None
    tokens = TokenPrices(
        options.price_per_million_prompt_tokens,
        options.price_per_million_cached_tokens,
        options.price_per_million_output_tokens,
    )
    return Pricing(per_second, tokens, options.currency)


def make_ledger(pricing: Pricing, coefficients: Callable[[], Coefficients]) -> CostLedger:
    """The cost ledger of an engine, starting now; ``coefficients`` are those of its step times."""
    began = time.monotonic()
    return CostLedger(
        pricing,
        coefficients,
        began=began,
        clock_offset=time.time() - began,
    )
