"""Rotary tables: the cosines and signed sines of every position, for the kernels.

They are computed once for the maximum context length, so a position's rotation does not depend on its request. So keys
can be shared between sequences, and chunked prefill gives the same result as a whole one. Two published schemes
(dynamic, longrope) depend on the length of the running sequence; here they use the maximum context length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.compute.model.spec import RopeSpec


def rope_table(rope: RopeSpec, max_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Float32 [max_positions, 2, rotary_dim]: cosines, then sines with the sign of the half-rotation."""
    frequencies = _frequencies(rope, max_positions).to(device)
    angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def _frequencies(rope: RopeSpec, max_positions: int) -> Tensor:
    """Radians per position of each feature pair, float32 [rotary_dim / 2]."""
    size = rope.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    plain = torch.reciprocal(rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain
        case "none":
            return torch.zeros_like(plain)
        case "linear":
            return plain / rope.factor
        case "dynamic":
            length = max(max_positions, rope.original_positions)
            stretch = rope.factor * length / rope.original_positions - (rope.factor - 1)
            base = rope.theta * stretch ** (size / (size - 2))
            return torch.reciprocal(base**exponents)
        case "longrope":
            long = max_positions > rope.original_positions
            return plain / torch.tensor(rope.long_factor if long else rope.short_factor)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Slow features are divided by the factor, fast ones are kept, and those between are blended."""
    turns = rope.original_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Like llama3, but blended linearly over the feature's index between two numbers of turns."""

    def index_of(turns: float) -> float:
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    slow = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return slow * plain / rope.factor + (1 - slow) * plain
