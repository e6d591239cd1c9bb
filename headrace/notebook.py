"""Simulations for notebooks and scripts: load a trace, run policies over it, and look at rows and plots.

```
from headrace.notebook import load_trace, simulate
trace = load_trace("azure.csv", limit=2000)
result = simulate(trace, {"fcfs": {"scheduling_policy": "fcfs"}, "mine": {"queue_order": MyOrder}})
pandas.DataFrame(result.summary)
```
Rows are plain dictionaries, so that any table library reads them. It needs neither torch nor a device; plots need
matplotlib. Each policy is simulated over the same requests by the engine that a server would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config import CacheOptions, ConfigError, SchedulerOptions, options
from headrace.core.request import Slo
from headrace.lab.plan.roofline import BFLOAT16, Replica, UnknownDevice
from headrace.lab.plan.roofline import device as device_spec
from headrace.lab.plots import LATENCY_INCHES, draw_latencies, plot_outcomes
from headrace.lab.simulate.runner import from_calls
from headrace.lab.simulate.tally import Outcome, outcome
from headrace.lab.workload.population import calls, parse
from headrace.lab.workload.traces import BadTrace, read_trace
from headrace.lab.workload.work import Call, Synthesis
from headrace.lab.workload.work import speedup as faster
from headrace.plots import NoPlots
from headrace.wiring.plugins import by_name
from headrace.wiring.simulation import (
    Machine,
    calibrated_machine,
    make_fleet,
    read_calibration,
    roofline_machine,
    shape_of,
)

Row = dict[str, Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests to simulate: arrivals, lengths, tenants. ``name`` goes into titles."""

    name: str
    calls: tuple[Call, ...]

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def rows(self) -> list[Row]:
        """One row per request."""
        return [
            {
                "arrived_seconds": call.arrival,
                "prompt_tokens": call.prompt_tokens,
                "output_tokens": call.output_tokens,
                "tenant": call.tenant,
                "service_class": call.service_class,
            }
            for call in self.calls
        ]


@dataclass(frozen=True, slots=True)
class Simulation:
    """Simulated policies, in the order in which they were given. Times are in seconds.

    ``summary`` has a row per policy, ``requests`` a row per request and policy, ``timeline`` a row per interval of the
    run and policy, and ``tenants`` a row per tenant and policy. ``title`` names the machine and the trace.
    """

    title: str
    summary: list[Row]
    requests: list[Row]
    timeline: list[Row]
    tenants: list[Row]
    outcomes: Mapping[str, Outcome]

    def plot(self) -> Any:
        """A matplotlib figure of the TTFT and TPOT of all policies, which a notebook shows.

        Raises:
            NoPlots: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError:
            raise NoPlots('no plot without matplotlib: pip install "headrace[bench]"') from None
        figure = pyplot.figure(figsize=LATENCY_INCHES, layout="constrained")
        draw_latencies(figure, self.outcomes, self.title)
        pyplot.close(figure)  # the cell that it is returned to shows it, once
        return figure

    def save_plots(self, folder: str | Path) -> list[Path]:
        """Write the plots of latencies, load and fairness as PNG files into a folder.

        Raises:
            NoPlots: matplotlib is not installed.
        """
        return plot_outcomes(self.outcomes, Path(folder), self.title)


def load_trace(path: str | Path, *, limit: int | None = None, speedup: float = 1.0) -> Trace:
    """The first ``limit`` requests of a trace file, ``speedup`` times as close to each other.

    The header tells the format; `headrace.lab.workload.traces` lists those that are known.

    Raises:
        ConfigError: a file that cannot be read.
    """
    try:
        return Trace(Path(path).name, tuple(faster(read_trace(Path(path), limit), speedup)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (BadTrace, ValueError) as error:
        raise ConfigError(str(error)) from None


def make_trace(*tenants: str, count: int = 1000, seed: int = 0) -> Trace:
    """A synthetic trace; each tenant is described as by ``headrace simulate --workload``.

    Raises:
        ConfigError: a description that cannot be read.
    """
    try:
        drawn = calls([parse(tenant) for tenant in tenants], count, seed)
        return Trace(", ".join(tenants), tuple(drawn))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def simulate(
    trace: Trace,
    policies: Mapping[str, Settings] | Sequence[str] = ("fair",),
    *,
    model: str = "llama-3.1-8b",
    device: str = "H100-SXM",
    degree: int = 1,
    calibration: str | Path | None = None,
    max_model_len: int | None = None,
    max_tokens: int | None = None,
    replicas: int = 1,
    ttft: float | None = None,
    tpot: float | None = None,
    seed: int = 0,
    **common: Any,
) -> Simulation:
    """Run each policy over the same requests.

    Args:
        trace: from `load_trace` or `make_trace`.
        policies: the options of each policy by its name; or names of scheduling policies. An option that names a
            policy accepts a class: ``{"queue_order": ShortestFirst}``.
        model: a known shape, or a folder or hub name with a ``config.json``.
        device: a known device; ``degree`` of them compute one replica.
        calibration: a file of ``headrace bench calibrate``, in place of model and device.
        max_model_len: the maximum context length in tokens.
        max_tokens: what every request asks for at most.
        replicas: engines behind a router.
        ttft: latency target of the first token in seconds, which the scheduler receives.
        tpot: latency target per further token in seconds.
        seed: of the prompts' tokens.
        common: options of the KV cache and the scheduler for all policies.

    Raises:
        ConfigError: an option or a name that does not exist or cannot work.
    """
    slo = {name: seconds for name, seconds in (("ttft", ttft), ("tpot", tpot)) if seconds is not None}
    outcomes: dict[str, Outcome] = {}
    requests: list[Row] = []
    machine = None
    for name, settings in _by_name(policies).items():
        both = {**common, **settings}
        plans, cache, machine = _prepare(both, model, device, degree, calibration, max_model_len)
        fleet = make_fleet(plans, cache, machine, replicas=replicas, with_rows=True)
        fleet.run(from_calls(trace.calls, Synthesis(seed=seed), max_tokens, Slo(ttft, tpot)))
        busy = [replica.runner.busy_seconds for replica in fleet.replicas]
        outcomes[name] = outcome(fleet.tally, slo, busy)
        requests += [{"policy": name, **row} for row in fleet.tally.rows]
    return Simulation(
        f"{machine.name if machine else 'nothing'}, {trace.name}",
        [_summary(name, each) for name, each in outcomes.items()],
        requests,
        [row for name, each in outcomes.items() for row in _timeline(name, each)],
        [row for name, each in outcomes.items() for row in _tenants(name, each)],
        outcomes,
    )


def _by_name(policies: Mapping[str, Settings] | Sequence[str]) -> Mapping[str, Settings]:
    if isinstance(policies, str):
        raise ConfigError(f"policies must be a list or a mapping, got the text {policies!r}")
    if isinstance(policies, Mapping):
        return policies
    return {name: {"scheduling_policy": name} for name in policies}


def _prepare(
    given: Settings,
    model: str,
    device: str,
    degree: int,
    calibration: str | Path | None,
    max_model_len: int | None,
) -> tuple[SchedulerOptions, CacheOptions, Machine]:
    """Options and machine; where ``max_num_seqs`` is not given it is the device's."""
    chosen = options(by_name(given), keywords=True)
    if calibration is not None:
        machine = calibrated_machine(read_calibration(Path(calibration)), chosen.cache, max_model_len)
        return chosen.scheduler, chosen.cache, machine
    try:
        spec = device_spec(device)
    except UnknownDevice as error:
        raise ConfigError(f"device: {error}") from None
    plans = chosen.scheduler
    if "max_num_seqs" not in chosen.chosen:
        most = plans.max_num_batched_tokens or spec.max_num_seqs
        plans = replace(plans, max_num_seqs=min(spec.max_num_seqs, most))
    replica = Replica(shape_of(model), spec, degree, BFLOAT16)
    return plans, chosen.cache, roofline_machine(replica, chosen.cache, plans, max_model_len)


def _summary(policy: str, result: Outcome) -> Row:
    whole = result.summary
    row: Row = {
        "policy": policy,
        "requests": whole.requests,
        "failed": whole.failed,
        "seconds": whole.seconds,
        "requests_per_second": whole.requests_per_second,
        "output_tokens_per_second": whole.output_tokens_per_second,
    }
    for quantity in ("ttft", "tpot", "itl", "e2e"):
        spread = getattr(whole, quantity)
        row |= {f"{quantity}_{figure}": getattr(spread, figure) for figure in ("mean", "p50", "p95", "p99")}
    return row | {"goodput": whole.goodput, "slo_share": whole.slo_share} | dict(result.facts)


def _timeline(policy: str, result: Outcome) -> list[Row]:
    columns = result.timeline
    return [
        {"policy": policy, **dict(zip(columns, values, strict=True))}
        for values in zip(*columns.values(), strict=True)
    ]


def _tenants(policy: str, result: Outcome) -> list[Row]:
    return [
        {
            "policy": policy,
            "tenant": part.name,
            "requests": part.requests,
            "failed": part.failed,
            "output_tokens": part.output_tokens,
            "ttft_p50": part.ttft.p50,
            "ttft_p99": part.ttft.p99,
            "tpot_p50": part.tpot.p50,
            "slo_share": part.slo_share,
        }
        for part in result.tenants
    ]
