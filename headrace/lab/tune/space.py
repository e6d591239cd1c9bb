"""The search space of tuning: settings with ordered values around the present ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Value = int | float
Settings = Mapping[str, Value]
"""Values by the names of the scheduler's options."""

MOST_SLOTS = 256
RATIOS = (0.1, 0.2, 0.4, 0.7, 1.2, 2.5, 5.0, 0.0)
"""Values of ``mixed_prefill_ratio``; 0 means no limit and therefore comes last."""

STEP_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.0)
"""Values of ``max_step_seconds``; 0 means no limit."""

FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)


def space(present: Settings) -> dict[str, list[Value]]:
    """The values of each setting around the ``present`` ones."""
    slots, tokens = present["max_num_seqs"], present["max_num_batched_tokens"]
    return {
        "max_num_seqs": _around(slots, 1, max(MOST_SLOTS, slots)),
        "max_num_batched_tokens": _around(tokens, 16, 1 << 16),
        "mixed_prefill_ratio": _with(RATIOS, present["mixed_prefill_ratio"]),
        "max_step_seconds": _with(STEP_SECONDS, present["max_step_seconds"]),
    }


def feasible(settings: Settings) -> dict[str, Value]:
    """Raises ``max_num_batched_tokens`` to at least ``max_num_seqs``, as the engine requires."""
    tokens = max(settings["max_num_batched_tokens"], settings["max_num_seqs"])
    return {**settings, "max_num_batched_tokens": tokens}


def _around(value: Value, low: Value, high: Value) -> list[Value]:
    return sorted({int(min(high, max(low, value * factor))) for factor in FACTORS})


def _with(values: Sequence[float], present: Value) -> list[Value]:
    """The values and the present one, ascending; 0 (no limit) is last."""
    return sorted({*values, float(present)}, key=lambda each: (each == 0, each))
