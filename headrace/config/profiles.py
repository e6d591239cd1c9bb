"""Profiles: presets of several settings, selected with ``--profile``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headrace.config.parts import PARTS, Options

_INTERACTIVE = {
    "scheduling_policy": "fair",
    "queue_order": "auto",
    "max_num_seqs": 32,
    "mixed_prefill_ratio": 0.4,
    "max_step_seconds": 0.05,
    "max_num_queued_reqs": 256,
    "stream_interval": 1,
}
_THROUGHPUT = {
    "scheduling_policy": "fair",
    "queue_order": "auto",
    "max_num_seqs": 256,
    "mixed_prefill_ratio": 0.0,
    "max_step_seconds": 0.0,
    "max_num_queued_reqs": 16_384,
    "stream_interval": 8,
}
_DEFAULTS = {each.name: each.default for kind in PARTS.values() for each in fields(kind)}

PROFILES: dict[str, dict[str, Any]] = {
    "interactive": _INTERACTIVE,
    "balanced": {name: _DEFAULTS[name] for name in _INTERACTIVE},
    "throughput": _THROUGHPUT,
}
"""The settings of each profile: low latency for people, a balance, or the most tokens per second for batch work."""


def profile_line(chosen: Options) -> str:
    """The profile with the values of its settings; if a value differs from the profile's, both are shown."""
    parts = [getattr(chosen, part) for part in PARTS]
    values = {each.name: getattr(part, each.name) for part in parts for each in fields(part)}
    shown = []
    for name, usual in PROFILES[chosen.scheduler.profile].items():
        note = "" if values[name] == usual else f" (profile default {usual})"
        shown.append(f"{name.replace('_', '-')} {values[name]}{note}")
    return f"{chosen.scheduler.profile}: {', '.join(shown)}"
