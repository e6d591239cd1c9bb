"""Selects the policies of an engine from its options: those of the scheduling policy, others by name, or plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from headrace.config import ConfigError, SchedulerOptions
from headrace.core.knobs import Knobs
from headrace.core.memory.eviction import CostAwareEviction, EvictionPolicy, LeastRecentlyUsed
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.step_curve import StepCost
from headrace.core.queueing.order import ByPriority, FirstComeFirstServed, OrderPolicy, ShortestFirst
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous, StaticBatch
from headrace.core.scheduler.victims import LastRanked, LowestRecomputeCost, VictimPolicy
from headrace.core.tenancy.tenants import ServiceClass
from headrace.wiring.plugins import Port, find_class, make_plugin

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
