"""Sleep of the model: its states, by vLLM's names, and the event of a change."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class SleepState(StrEnum):
    """Whether the model sleeps: its KV cache was freed (level 1), or its weights too (level 2)."""

    AWAKE = "awake"
    WEIGHTS_OFFLOADED = "weights_offloaded"
    DISCARD_ALL = "discard_all"


class SleepChanged(NamedTuple):
    """The model was put to sleep or woken up, in so many seconds."""

    state: SleepState
    seconds: float
