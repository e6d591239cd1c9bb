"""Speculative decoding of a simulation: the flags ``--acceptance`` and ``--draft-cost``, checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headrace.config import ConfigError, SchedulerOptions
from headrace.lab.forced_acceptance import BadRates, Speculation, rates_of

ADAPTIVE = '{"method": "ngram"}'
"""The drafts of ``--acceptance`` where ``--speculative-config`` says nothing: as many as pay. The method is ignored."""


def read_speculation(acceptance: str | None, cost: float) -> Speculation | None:
    """What the flags say of drafts: numbers, or those of a file that was recorded with ``--record-trace``.

    Raises:
        ConfigError: neither, a cost without drafts, or a trace without any.
    """
    if acceptance is None:
        if cost:
            raise ConfigError(f"--draft-cost {cost:g} needs --acceptance: without it nothing is drafted")
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
    """The options with drafts as the flags ask for them.

    Raises:
        ConfigError: drafts without an acceptance.
    """
    if speculation is None:
        if plans.speculative_config is not None:
            raise ConfigError(
                "--speculative-config: a simulation has no text to draft from; set --acceptance, for example to 0.7"
            )
        return plans
    return dataclasses.replace(plans, speculative_config=plans.speculative_config or ADAPTIVE)
