"""The few policy numbers that may change while the engine runs: frozen, swapped whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knobs:
    """Bounds of one step.

    ``batched_tokens`` bounds the tokens computed in a step. ``chunked_prefill`` lets a prompt be split over
    steps; without it a prompt waits until it fits whole. ``long_prefill_tokens`` bounds one request's chunk
    (0: no bound). ``mixed_prefill_tokens`` bounds all prefill in a step that also decodes (0: no bound), so
    that a long prompt cannot stretch the others' inter-token latency. ``max_skips`` bounds how often a
    waiting request that does not fit may be overtaken.
    """

    batched_tokens: int = 2048
    chunked_prefill: bool = True
    long_prefill_tokens: int = 0
    mixed_prefill_tokens: int = 0
    max_skips: int = 16
