"""The settings that may change while the engine runs, by the names of their options, with types and bounds.

Experiments and the tuner change only these. Engine settings are fields of `core.knobs.Knobs`, which is replaced as a
whole between two steps. Per-request settings are fields of `core.request.RequestSettings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.core.knobs import Knobs
from headrace.core.request import ALL_METHODS, NO_METHOD

Value = float | int
"""The value of a setting of the engine."""

AnyValue = float | int | str
"""The value of any setting."""


PER_REQUEST = frozenset({"request_timeout", "draft_method", "draft_tokens", "semantic_min_similarity"})
"""The per-request settings."""


class BadValue(ValueError):
    """A value of another type, or out of the setting's bounds."""


class Setting(NamedTuple):
    """A setting with its ``field``; ``low`` and ``high`` are the limits of its value.

    With ``choices``, the value is one of them. ``per_request``: requests may have different values at the same time.
    """

    field: str
    whole: bool
    low: float
    high: float
    help: str
    choices: tuple[str, ...] = ()
    per_request: bool = False

    def describe(self, value: AnyValue) -> dict[str, Any]:
        """The setting with its present value, as clients see it."""
        units = ["request", "tenant"] if self.per_request else ["time"]
        if self.choices:
            bounds: dict[str, Any] = {"choices": list(self.choices)}
        else:
            bounds = {"low": self.low, "high": self.high}
        return {"value": value, **bounds, "help": self.help, "units": units}


class Change(NamedTuple):
    """A change of a setting to ``value``; ``why`` names the experiment and its arm, or what the tuner expects."""

    setting: str
    value: AnyValue
    why: str


def live_settings(
    max_num_seqs: int, *, static: bool = False, patience: bool = False
) -> Mapping[str, Setting]:
    """All settings of an engine with ``max_num_seqs`` slots; with ``static`` batching, also the batch timeout.

    ``patience``: the queue order depends on the knob of that name.
    """
    timeout = Setting(
        "static_batch_seconds", False, 0.0, 60.0, "Time after which an incomplete static batch starts."
    )
    order = Setting(
        "queue_patience",
        False,
        0.0,
        1000.0,
        "Queue order of new requests: seconds of waiting that outweigh one second of predicted work; 0: by arrival.",
    )
    return {
        **({"static_batch_timeout": timeout} if static else {}),
        **({"queue_patience": order} if patience else {}),
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


def request_settings(methods: Sequence[str], most_tokens: int, semantic: bool) -> Mapping[str, Setting]:
    """The per-request settings of a server with drafting ``methods`` and at most ``most_tokens`` drafts per step.

    ``semantic``: the semantic cache serves responses.
    """
    found = {
        "request_timeout": Setting(
            "request_timeout", False, 0.1, 86_400.0, "Seconds after which a request ends.", per_request=True
        )
    }
    if methods:
        found["draft_method"] = Setting(
            "draft_method",
            False,
            0.0,
            0.0,
            "Method of speculative decoding; all: the most promising one, none: no drafts.",
            (ALL_METHODS, NO_METHOD, *methods),
            True,
        )
        found["draft_tokens"] = Setting(
            "draft_tokens",
            True,
            0,
            most_tokens,
            "Most tokens drafted for a request in a step.",
            per_request=True,
        )
    if semantic:
        found["semantic_min_similarity"] = Setting(
            "semantic_min_similarity",
            False,
            0.0,
            1.0,
            "Smallest cosine of a similar request whose response is served; the calibrated threshold always holds.",
            per_request=True,
        )
    return found


def values(settings: Mapping[str, Setting], knobs: Knobs) -> dict[str, Value]:
    """The present value of each setting."""
    return {name: getattr(knobs, each.field) for name, each in settings.items()}


def checked(settings: Mapping[str, Setting], name: str, value: object) -> AnyValue:
    """``value`` in the setting's type.

    Raises:
        BadValue: it has another type or is out of bounds.
    """
    setting = settings[name]
    if setting.choices:
        if value not in setting.choices:
            raise BadValue(f"{name} must be one of {', '.join(setting.choices)}")
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadValue(f"{name} needs a number")
    if setting.whole and value != int(value):
        raise BadValue(f"{name} needs a whole number")
    if not setting.low <= value <= setting.high:
        raise BadValue(f"{name} {_text(value)} is not between {_text(setting.low)} and {_text(setting.high)}")
    return int(value) if setting.whole else float(value)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def changed(settings: Mapping[str, Setting], knobs: Knobs, name: str, value: object) -> Knobs:
    """``knobs`` with one setting changed.

    Raises:
        BadValue: as `checked`.
    """
    fields: dict[str, Any] = {settings[name].field: checked(settings, name, value)}
    return replace(knobs, **fields)
