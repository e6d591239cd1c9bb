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
