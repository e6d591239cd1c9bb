"""Speculative decoding of a simulation: the flags ``--acceptance`` and ``--draft-cost``, checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headrace.config import ConfigError, SchedulerOptions
from headrace.lab.forced_acceptance import BadRates, Speculation, rates_of

ADAPTIVE = '{"method": "ngram"}'
"""Default of ``--speculative-config`` with ``--acceptance``: adaptive draft lengths. The method is ignored."""


def read_speculation(acceptance: str | None, cost: float) -> Speculation | None:
    """Speculation from the flags: acceptance rates as numbers, or from a trace of ``--record-trace``.

    Raises:
        ConfigError: invalid rates, a cost without ``--acceptance``, or a trace without verified drafts.
    """
    if acceptance is None:
        if cost:
            raise ConfigError(f"--draft-cost {cost:g} requires --acceptance: without it nothing is drafted")
        return None
    path = Path(acceptance)
    try:
        rates = _recorded(path) if path.is_file() else rates_of(acceptance)
    except BadRates as error:
        raise ConfigError(f"--acceptance: {error}, or the file of a recorded trace") from None
    return Speculation(rates, cost)


def _recorded(path: Path) -> tuple[float, ...]:
    from headrace.lab.replay.rerun import recorded_rates
    from headrace.lab.replay.trace import BadTrace, read_trace

    try:
        rates = recorded_rates(read_trace(path))
    except OSError as error:
        raise ConfigError(
            f"--acceptance {path} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except BadTrace as error:
        raise ConfigError(f"--acceptance: {error}") from None
    if not rates:
        raise ConfigError(f"--acceptance {path}: no drafts were verified in this trace")
    return rates


def with_speculation(plans: SchedulerOptions, speculation: Speculation | None) -> SchedulerOptions:
    """The options with speculative decoding as given by the flags.

    Raises:
        ConfigError: ``--speculative-config`` without ``--acceptance``.
    """
    if speculation is None:
        if plans.speculative_config is not None:
            raise ConfigError(
                "--speculative-config: a simulation has no text to draft from; set --acceptance, for example to 0.7"
            )
        return plans
    return dataclasses.replace(plans, speculative_config=plans.speculative_config or ADAPTIVE)


def wire_of(gigabytes: float, latency: float, at_once: bool, degree: int) -> Wire:
    """The connection of a replica of ``degree`` devices."""
    from headrace.lab.simulate.fleet import Wire

    return Wire(latency, 1e9 * gigabytes * degree, at_once)


def read_calls(
    trace: Path | None,
    workload: Collection[str],
    requests: int | None,
    faster: float,
    seed: int,
    *,
    resample: bool = False,
    trace_flag: str = "--trace",
) -> Iterator[Call]:
    """The requests of a trace or of a synthetic workload, as the flags say; errors name the trace by ``trace_flag``.

    Raises:
        ConfigError: neither or both flags, or a file that cannot be read or has no requests. A bad line is reported
            when it is reached.
    """
    from headrace.lab.workload import population
    from headrace.lab.workload.call import resampled, speedup
    from headrace.lab.workload.traces import BadTrace, read_trace

    if (trace is None) == (not workload):
        raise ConfigError("give the requests with either --trace FILE or --workload (see --help)")
    if resample and (trace is None or requests is None):
        raise ConfigError("--resample draws --requests from a --trace: it needs both")
    calls: Iterable[Call]
    try:
        if trace is None:
            tenants = [population.parse(text) for text in workload]
            calls = population.calls(tenants, requests or 1000, seed)
        elif resample:
            calls = resampled(list(read_trace(trace)), requests or 0, seed)
        else:
            with trace.open():  # a missing file is reported now, not in the middle
                calls = read_trace(trace, requests)
        return _readable(speedup(calls, faster), f"{trace_flag} {trace}")
    except OSError as error:
        raise ConfigError(
            f"{trace_flag} {trace} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except (BadTrace, population.BadPopulation, ValueError) as error:
        raise ConfigError(str(error)) from None


def _readable(calls: Iterator[Call], source: str) -> Iterator[Call]:
    from headrace.lab.workload.traces import BadTrace

    empty = True
    try:
        for call in calls:
            empty = False
            yield call
    except BadTrace as error:
        raise ConfigError(str(error)) from None
    if empty:
        raise ConfigError(f"{source} has no requests with a prompt and an output")
