"""Policy settings that may change while the engine runs: frozen, replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knobs:
    """Bounds of one step.

    ``batched_tokens`` bounds the tokens computed in a step. ``chunked_prefill`` lets a prompt be split over steps;
    without it a prompt waits until it fits whole. ``long_prefill_tokens`` bounds one request's chunk (0: no bound).
    ``mixed_prefill_ratio`` bounds the prefill time of a step that also decodes, as a share of its decoding time (0:
    no bound). At 0.7 one long prompt keeps the inter-token latency of the others under 1.7 times, however long it is,
    or under 10 ms. Several prompts may add the fourth root of their number as much. ``step_seconds`` bounds the
    predicted time of a step that decodes (0: only the TPOT targets of decoding requests). ``max_skips`` bounds how
    often a waiting request that does not fit may be passed over. ``max_running`` bounds the running requests below the
    number of slots (0: no bound); those that run already go on. ``static_batch_seconds`` is how long an incomplete
    static batch waits (None: as its policy was made). ``turns`` is the number of steps in flight that decode different
    sequences: as many as a pipeline computes at once. ``queue_patience`` is how many seconds of waiting outweigh one
    second of predicted work in the order of requests that arrive from now on (0: by age; only the policy ``fair``).
    """

    batched_tokens: int = 2048
    chunked_prefill: bool = True
    long_prefill_tokens: int = 0
    mixed_prefill_ratio: float = 0.0
    step_seconds: float = 0.0
    max_skips: int = 16
    max_running: int = 0
    static_batch_seconds: float | None = None
    turns: int = 1
    queue_patience: float = 0.0
