"""The simulation of one fleet, with which ``headrace plan`` confirms an estimate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.cli.simulation.speculation import with_speculation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.cli.progress import Meter
    from headrace.lab.forced_acceptance import Speculation
    from headrace.lab.plan.capacity import Settings, Slo
    from headrace.lab.plan.roofline import Replica
    from headrace.lab.plan.search import Fleet, Supply, Trial
    from headrace.lab.simulate.fleet import Wire
    from headrace.lab.workload.call import Call

HOST_BYTES = 32 << 30
"""Host memory for pulled blocks, for each device of a replica in a fleet with prefill replicas."""


class Wanted(NamedTuple):
    """The requirements of a fleet."""

    calls: Sequence[Call]
    slo: Slo
    routing: str
    max_devices: int
    seed: int
    speculation: Speculation | None
    supply: Supply
    split: bool
    wire: Callable[[int], Wire]


def confirmation(wanted: Wanted, longest: int, meter: Meter) -> Callable[[Fleet], Trial]:
    """Returns a function that simulates a fleet with the server's engine and policies on a roofline device."""
    from headrace.config import CacheOptions, SchedulerOptions
    from headrace.core.request import Slo as RequestSlo
    from headrace.lab.plan.report import fleet_text
    from headrace.lab.plan.search import Trial, error_bound, prefill_replicas, simulated_replicas
    from headrace.lab.simulate.outcome import outcome
    from headrace.lab.simulate.runner import from_calls
    from headrace.lab.workload.call import Synthesis, speedup
    from headrace.wiring.simulation import make_fleet, roofline_machine

    slo = wanted.slo

    def confirm(fleet: Fleet) -> Trial:
        settings: Settings = fleet.settings
        replica: Replica = fleet.replica
        meter.text = f"simulating {fleet_text(fleet)}"
        plans = SchedulerOptions(
            max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens
        )
        plans = with_speculation(plans, wanted.speculation)
        host = HOST_BYTES * replica.degree if fleet.prefill_share else 0
        cache = CacheOptions(block_size=settings.block_size, kv_offload_bytes=host)
        machine = roofline_machine(replica, cache, plans, longest + settings.block_size)
        sample = simulated_replicas(fleet.replicas)
        simulated = make_fleet(
            *(plans, cache, machine),
            replicas=sample,
            prefill=prefill_replicas(sample, fleet.prefill_share),
            wire=wanted.wire(replica.degree),
            routing=wanted.routing,
            speculation=wanted.speculation,
            with_rows=True,
        )
        targets = RequestSlo(slo.ttft, slo.tpot)
        calls = speedup(wanted.calls, sample / fleet.replicas)
        simulated.run(from_calls(calls, Synthesis(seed=wanted.seed), slo=targets))
        result = outcome(simulated.tally, {"ttft": slo.ttft, "tpot": slo.tpot})
        summary = result.summary
        return Trial(
            attained=(summary.goodput or 0.0) * summary.seconds / summary.requests,
            ttft_p95=summary.ttft.p95,
            tpot_p95=summary.tpot.p95,
            output_tokens_per_second=summary.output_tokens_per_second * fleet.replicas / sample,
            preemptions=result.facts["preemptions"],
            error=error_bound([_met(row, slo) for row in sorted(simulated.tally.rows, key=_arrival)]),
        )

    return confirm


def _arrival(row: Mapping[str, Any]) -> float:
    return float(row["arrived_seconds"])


def _met(row: Mapping[str, Any], slo: Slo) -> bool:
    """Whether a simulated request met both targets. A failed one has no TTFT; a single token has no TPOT to miss."""
    ttft = float(row.get("ttft_seconds", math.inf))
    tpot = float(row.get("tpot_seconds") or 0.0)
    return ttft <= slo.ttft and tpot <= slo.tpot
