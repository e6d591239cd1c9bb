"""The formats on disk written down once more, one number at a time, from their public descriptions.

A `Linear` is random integers with their scales and zeros; each function makes of it the tensors that a format's tool
would have saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Linear:
    """Unsigned ``integers`` [out, in]; ``scales`` and ``zeros`` [out, groups]; ``group_of`` [in]."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    bits: int

    @classmethod
    def draw(
        cls, shape: tuple[int, int], bits: int, group: int, *, symmetric: bool, mixed: bool, seed: int
    ) -> Linear:
        generator = torch.Generator().manual_seed(seed)
        (outputs, inputs), groups = shape, shape[1] // group
        top = 1 << bits
        integers = torch.randint(0, top, shape, generator=generator)
        zeros = torch.full((outputs, groups), top // 2)
        if not symmetric:  # the formats' first version cannot store a zero of 0
            zeros = torch.randint(1, top, zeros.shape, generator=generator)
        scales = (torch.rand(outputs, groups, generator=generator) + 0.5) * 0.8 / top
        group_of = torch.arange(inputs) // group
        if mixed:
            group_of = group_of[torch.randperm(inputs, generator=generator)]
        return cls(integers, scales.half().float(), zeros, group_of, bits)

    def dense(self) -> Tensor:
        return (self.integers - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]


def packed(rows: Tensor, bits: int, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Each row's numbers in 32-bit words, number ``places[i]`` of a word in its i-th lowest bits."""
    per_word = 32 // bits
    words = np.zeros((len(rows), -(-rows.shape[1] // per_word)), dtype=np.uint32)
    for r, row in enumerate(rows.tolist()):
        row += [0] * (-len(row) % per_word)
        for w in range(words.shape[1]):
            for place in range(per_word):
                words[r, w] |= np.uint32(row[w * per_word + places[place]]) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def gptq(linear: Linear, less_one: int) -> dict[str, Tensor]:
    return {
        "qweight": packed(linear.integers, linear.bits).t().contiguous(),
        "qzeros": packed((linear.zeros - less_one).t(), linear.bits),
        "scales": linear.scales.t().half().contiguous(),
        "g_idx": linear.group_of.int(),
    }


def awq(linear: Linear) -> dict[str, Tensor]:
    return {
        "qweight": packed(linear.integers.t(), 4, AWQ_ORDER),
        "qzeros": packed(linear.zeros.t(), 4, AWQ_ORDER),
        "scales": linear.scales.t().half().contiguous(),
    }


def pack_quantized(linear: Linear, *, symmetric: bool, ordered: bool) -> dict[str, Tensor]:
    parts = {
        "weight_packed": packed(linear.integers, linear.bits),
        "weight_scale": linear.scales.half(),
        "weight_shape": torch.tensor(linear.integers.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = packed(linear.zeros.t(), linear.bits).t().contiguous()
    if ordered:
        parts["weight_g_idx"] = linear.group_of.int()
    return parts


def int_quantized(linear: Linear, *, symmetric: bool) -> dict[str, Tensor]:
    parts = {"weight": (linear.integers - 128).to(torch.int8), "weight_scale": linear.scales}
    if not symmetric:
        parts["weight_zero_point"] = (linear.zeros - 128).to(torch.int8)
    return parts
