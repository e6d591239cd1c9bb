"""Linear layers in the format of AutoAWQ (version ``gemm``): ``qweight``, ``qzeros``, ``scales``.

Words run along the outputs; a row is an input. Within a word the outputs are interleaved, even ones first, as the
original GPU kernel unpacks them (arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from headrace.compute.quantization.gptq_format import check_shape, groups_of
from headrace.compute.quantization.weight import QuantizedWeight, pack_halves
from headrace.compute.quantization.words import integers_of

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each output in a word."""


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """One linear layer in 4 bits; ``group_size`` inputs share scale and zero (None: all)."""

    group_size: int | None
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ()

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `stored.LinearLayout`."""
        outputs, inputs = shape
        groups = groups_of(inputs, self.group_size)
        check_shape("qweight", parts["qweight"], (inputs, outputs // 8))
        check_shape("qzeros", parts["qzeros"], (groups, outputs // 8))
        check_shape("scales", parts["scales"], (groups, outputs))
        return QuantizedWeight(
            pack_halves(_unpacked(parts["qweight"])),
            parts["scales"].t().float().contiguous(),
            _unpacked(parts["qzeros"]),
            None,
            4,
            16,
        )


def _unpacked(words: Tensor) -> Tensor:
    """Words [rows, outputs / 8] as int8 [outputs, rows]."""
    rows = len(words)
    interleaved = integers_of(words, 4).view(rows, -1, 8)
    return interleaved[..., _PLACES].reshape(rows, -1).t().contiguous()
