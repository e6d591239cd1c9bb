"""The internal layout of a quantized linear weight, which every reader fills and every kernel reads.

A weight is ``(value - zero) * scale``, with values of 8 or 4 bits and one scale (and zero) for each group of
consecutive inputs of an output. Values of 8 bits are integers, or floats in fp8 (e4m3), which have no zeros:

```
            in ──────────────────────────────▶
     out    │ group 0 │ group 1 │ ...        │   values  int8 or fp8 [out, in], or uint8 [out, in / 2]
      │     │ s, z    │ s, z    │            │   scales  float32 [out, groups]
      ▼     │         │         │            │   zeros   int8 [out, groups], or None: all zero
```

Values of 4 bits may also be floats in fp4 (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives). Their doubles are
integers, which is what such a code stands for here: the scale of a group is half of the stored one, exactly.

Where zero need not be one of the values, a group has a minimum instead of a zero, which is the weight of the lowest
value: ``(value - lowest) * scale + minimum``, with ``lowest`` -8 or -128. Such are the K formats of GGUF.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP4_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code of e2m1."""

_ELEMENTS_AT_ONCE = 1 << 24
"""Elements dequantized at once, which limits the temporary memory to 64 MiB."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] in 8 or 4 bits; immutable, all parts contiguous and on one device.

    Args:
        values: int8 or float8_e4m3fn [out, in]; or with 4 bits uint8 [out, in / 2], where the low half of a byte
            holds the even input and each half is the value plus 8, or with ``fp4`` a code of `FP4_DOUBLES`.
        scales: float32 [out, groups]; ``groups`` divides ``in``.
        zeros: int8 [out, groups] in the range of the values, or None if all are 0 (symmetric).
        order: int64 [in], or None: input ``i`` of the values is feature ``order[i]`` of the activations (GPTQ's
            ``desc_act``).
        bits: bits of a value.
        activation_bits: 16: activations are not quantized. 8: the product is defined with activations that are
            quantized per token, symmetrically: ``round(x / s)`` with ``s = max|x| / 127``. For a weight in fp8 they are
            the nearest e4m3 of ``x / s`` with ``s = max|x| / 448``.
        minima: float32 [out, groups], or None; only integers have them, and no zeros beside them.
        fp4: values of 4 bits are codes of floats; there are no zeros and no minima.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    bits: Literal[4, 8]
    activation_bits: Literal[8, 16]
    minima: Tensor | None = None
    fp4: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.values.shape
        return outputs, width * (8 // self.bits)

    @property
    def in_fp8(self) -> bool:
        """Whether the values are floats."""
        return self.values.dtype == FP8

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def kind(self) -> str:
        """Bits of weights and activations, and the group: ``W4A16 in groups of 128``."""
        per = "" if self.scales.shape[1] == 1 else f" in groups of {self.group_size}"
        stored = "fp8 " if self.in_fp8 else "fp4 " if self.fp4 else ""
        ordered = " reordered" if self.order is not None else ""
        based = "" if self.minima is None else " with minima"
        return f"{stored}W{self.bits}A{self.activation_bits}{per}{based}{ordered}"

    @property
    def lowest(self) -> int:
        """The lowest value of integers."""
        return -(1 << (self.bits - 1))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that exist."""
        parts = self.values, self.scales, self.zeros, self.minima, self.order
        return tuple(part for part in parts if part is not None)

    def _with_groups(self, values: Tensor, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The weight with other ``values``, and what each group has after a ``change``."""
        zeros, minima = (None if part is None else change(part) for part in (self.zeros, self.minima))
        return replace(self, values=values, scales=change(self.scales), zeros=zeros, minima=minima)

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        """Some of the outputs, as a weight that shares the memory of this one."""
        return self._with_groups(self.values[begin:end], lambda part: part[begin:end])

    def reordered(self, outputs: Tensor) -> QuantizedWeight:
        """The outputs of the indices int64 [out], in this order."""
        values = self.values.view(torch.int8)[outputs].view(self.values.dtype)  # fp8 cannot be indexed
        return self._with_groups(values, lambda part: part[outputs])

    def columns(self, begin: int, end: int) -> QuantizedWeight:
        """Some of the inputs, in new memory.

        Raises:
            ValueError: a group would be split, or the inputs are not in the order of the activations.
        """
        inputs, group = self.shape[1], self.group_size
        if (begin, end) == (0, inputs):
            return self
        if self.order is not None:
            raise ValueError(
                "its inputs are in another order than the activations (desc_act), so its groups cannot be divided"
            )
        per_value, groups = 8 // self.bits, slice(None)
        if self.scales.shape[1] > 1:
            if begin % group or end % group:
                raise ValueError(f"inputs {begin} to {end} would split a group of {group}")
            groups = slice(begin // group, end // group)
        if begin % per_value or end % per_value:
            raise ValueError(f"inputs {begin} to {end} would split a byte of {per_value} values")
        values = self.values[:, begin // per_value : end // per_value].contiguous()
        return self._with_groups(values, lambda part: part[:, groups].contiguous())

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The weight on ``device``."""
        moved = self._with_groups(self.values.to(device), lambda part: part.to(device))
        return moved if moved.order is None else replace(moved, order=moved.order.to(device))

    def integers(self) -> Tensor:
        """The values of a weight of integers, int8 [out, in]."""
        if self.bits == 8:
            return self.values
        halves = torch.stack((self.values & 15, self.values >> 4), -1).flatten(1)
        if self.fp4:
            return torch.tensor(FP4_DOUBLES, dtype=torch.int8, device=halves.device)[halves.int()]
        return halves.to(torch.int8) - 8

    def in_bytes(self) -> QuantizedWeight:
        """The same weight, if it has no minima, with integers of 8 bits."""
        return replace(self, values=self.integers(), bits=8, fp4=False)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized weight [out, in], with inputs in the order of the activations."""
        weight = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        step = max(1, _ELEMENTS_AT_ONCE // self.shape[1])
        for begin in range(0, len(weight), step):
            weight[begin : begin + step] = self.rows(begin, begin + step)._dequantized()
        return weight

    def _dequantized(self) -> Tensor:
        outputs, inputs = self.shape
        values = self.values if self.in_fp8 else self.integers()
        grouped = values.float().view(outputs, -1, self.group_size)
        if self.zeros is not None:
            grouped -= self.zeros[..., None]
        if self.minima is not None:
            grouped -= self.lowest
        weight = grouped.mul_(self.scales[..., None])
        if self.minima is not None:
            weight += self.minima[..., None]
        weight = weight.view(outputs, inputs)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order, weight)
        return weight


def pack_halves(values: Tensor) -> Tensor:
    """Values of 4 bits, int8 [out, in] in -8..7, in the layout of `QuantizedWeight`: uint8 [out, in / 2]."""
    shifted = (values + 8).to(torch.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack weights with the same inputs into one, outputs after outputs (queries, keys, values; gate, up).

    Parts that differ in bits or groups take the most bits and the finest groups of all, and minima if one of them has
    minima. That changes no weight.

    Raises:
        ValueError: they differ in type, order of inputs or kind of activations; or no common form is exact.
    """
    first = parts[0]
    for part in parts[1:]:
        same_order = (part.order is None) == (first.order is None) and (
            part.order is None or first.order is None or torch.equal(part.order, first.order)
        )
        same = (part.in_fp8, part.activation_bits, part.shape[1]) == (
            first.in_fp8,
            first.activation_bits,
            first.shape[1],
        )
        if not (same and same_order):
            raise ValueError(
                "weights that are computed as one must have the same type, order and activations"
            )
    based = any(part.minima is not None for part in parts)
    if any(part.fp4 for part in parts) and (based or not all(part.fp4 for part in parts)):
        parts = [part.in_bytes() if part.fp4 else part for part in parts]
    bits = max(part.bits for part in parts)
    group = math.gcd(*(part.group_size for part in parts))
    parts = [_in_form(part, bits, group, based=based) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [
                torch.zeros_like(part.scales, dtype=torch.int8) if part.zeros is None else part.zeros
                for part in parts
            ]
        )
    return QuantizedWeight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        zeros,
        first.order,
        bits,
        first.activation_bits,
        torch.cat([part.minima for part in parts if part.minima is not None]) if based else None,
        parts[0].fp4,
    )


def _in_form(weight: QuantizedWeight, bits: Literal[4, 8], group: int, *, based: bool) -> QuantizedWeight:
    """The same weight with ``bits``, groups of ``group``, and minima if ``based``.

    Raises:
        ValueError: a minimum cannot be exact in float32.
    """
    form, times = weight, weight.group_size // group
    if times > 1:
        form = weight._with_groups(weight.values, lambda part: part.repeat_interleave(times, 1))
    lowest = -(1 << (bits - 1))
    if bits != weight.bits:
        integers = weight.integers().short()
        if weight.minima is not None:  # the same distance from the lowest value
            integers += lowest - weight.lowest
        form = replace(form, values=integers.to(torch.int8), bits=bits)
    if not based or weight.minima is not None:
        return form
    integers = form.integers().short()
    least = int(integers.min())
    values = (integers + (lowest - least)).to(torch.int8)
    zeros = 0 if form.zeros is None else form.zeros.float()
    form = replace(
        form,
        values=pack_halves(values) if bits == 4 else values,
        zeros=None,
        minima=(least - zeros) * form.scales,
    )
    if not torch.equal(form.dequantized(), weight.dequantized()):
        raise ValueError("the weights of the lowest values are not exact in float32")
    return form
