"""The settings that tuning searches, each with its values in order: the present one, and steps below and above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Value = int | float
Settings = Mapping[str, Value]
"""Values by the names of the scheduler's options."""

MOST_SLOTS = 256
RATIOS = (0.1, 0.2, 0.4, 0.7, 1.2, 2.5, 5.0, 0.0)
"""Values of ``mixed_prefill_ratio``; 0 sets no limit, which is beyond the largest."""

STEP_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.0)
"""Values of ``max_step_seconds``; 0 sets no limit."""

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
    """The settings with steps that hold at least one token of each running sequence, as the engine demands."""
    tokens = max(settings["max_num_batched_tokens"], settings["max_num_seqs"])
    return {**settings, "max_num_batched_tokens": tokens}


def _around(value: Value, low: Value, high: Value) -> list[Value]:
    return sorted({int(min(high, max(low, value * factor))) for factor in FACTORS})


def _with(values: Sequence[float], present: Value) -> list[Value]:
    """The values and the present one, ascending; 0 is last, since it sets no limit."""
    return sorted({*values, float(present)}, key=lambda each: (each == 0, each))
