"""The sizes and options of an encoder, as frozen values; `families` reads them from a ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes in elements; ``first_position`` is the row of the position table for the first token.

    ``num_labels`` is the number of outputs of a classification head, if the checkpoint has one. ``layers`` are those
    of an encoder with rotary positions.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    norm_eps: float
    first_position: int = 0
    num_labels: int = 1
    layers: tuple[RotaryLayer, ...] = ()
    classifier_pooling: str = "cls"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class RotaryLayer:
    """One layer: base of its rotary positions, and how far to each side a token attends (None: to all tokens)."""

    theta: float
    reach: int | None
