"""The settings that may change while the engine runs, by the names of their options, with types and bounds.

Experiments and the tuner change these and nothing else. Each is a field of `core.knobs.Knobs`, which is replaced as a
whole between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.core.knobs import Knobs

Value = float | int
"""The value of a setting."""


class BadValue(ValueError):
    """A value of another type, or out of the setting's bounds."""


class Setting(NamedTuple):
    """A setting with its ``field`` in `Knobs`; ``low`` and ``high`` bound what may be set while running."""

    field: str
    whole: bool
    low: float
    high: float
    help: str


def live_settings(max_num_seqs: int, *, static: bool = False) -> Mapping[str, Setting]:
    """All settings of an engine with so many slots; ``static`` batches have a timeout too."""
    timeout = Setting(
        "static_batch_seconds", False, 0.0, 60.0, "Time after which an incomplete static batch starts."
    )
    return {
        **({"static_batch_timeout": timeout} if static else {}),
        "max_num_batched_tokens": Setting(
            "batched_tokens", True, max_num_seqs, 1 << 20, "Most tokens computed in one step."
        ),
        "mixed_prefill_ratio": Setting(
            "mixed_prefill_ratio",
            False,
            0.0,
            100.0,
            "Prefill time of a step, as a share of its decoding time.",
        ),
        "max_step_seconds": Setting(
            "step_seconds", False, 0.0, 60.0, "Longest predicted time of a step that decodes; 0: no bound."
        ),
        "long_prefill_token_threshold": Setting(
            "long_prefill_tokens", True, 0, 1 << 20, "Longest chunk of one prompt in a step; 0: no bound."
        ),
        "max_running": Setting(
            "max_running", True, 0, max_num_seqs, "Most running requests; 0: as many as there are slots."
        ),
    }


def values(settings: Mapping[str, Setting], knobs: Knobs) -> dict[str, Value]:
    """The present value of each setting."""
    return {name: getattr(knobs, each.field) for name, each in settings.items()}


def checked(settings: Mapping[str, Setting], name: str, value: object) -> Value:
    """``value`` in the setting's type.

    Raises:
        BadValue: it has another type or is out of bounds.
    """
    setting = settings[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadValue(f"{name} needs a number")
    if setting.whole and value != int(value):
        raise BadValue(f"{name} needs a whole number")
    if not setting.low <= value <= setting.high:
        raise BadValue(f"{name} {value:g} is not between {setting.low:g} and {setting.high:g}")
    return int(value) if setting.whole else float(value)


def changed(settings: Mapping[str, Setting], knobs: Knobs, name: str, value: object) -> Knobs:
    """``knobs`` with one setting changed.

    Raises:
        BadValue: as `checked`.
    """
    fields: dict[str, Any] = {settings[name].field: checked(settings, name, value)}
    return replace(knobs, **fields)
