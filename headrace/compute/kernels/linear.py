"""Linear layers in torch: on a CPU through oneDNN with prepacked weights, elsewhere as torch does it.

The BLAS behind torch's float32 matrix product takes a slow path on some x86 processors. oneDNN with weights packed
once is two to four times faster there from four rows on, and in bfloat16 for any number. A single row is faster
without packing if the matrix is small, because calling oneDNN costs more than the product.

A quantized weight stays quantized in memory: each call dequantizes it again, some outputs at a time. This defines
such a product, and is not fast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.quantization.weight import FP8, FP8_LARGEST, QuantizedWeight

_PLAIN_ELEMENTS = 1 << 20
"""Up to this size a float32 matrix is also kept unpacked, for single rows (4 MiB)."""
_PACKED_ROWS = 64
"""Number of rows for which the packed layout is chosen; it works for other numbers as well."""
_DEQUANTIZED_ELEMENTS = 1 << 24
"""Elements of a quantized weight that are dequantized at once (64 MiB in float32)."""


class Packed(NamedTuple):
    """A weight in oneDNN's layout, and also unpacked if single rows are faster that way."""

    packed: Tensor
    plain: Tensor | None


Prepared = Tensor | Packed | QuantizedWeight


def prepare(weight: Tensor | QuantizedWeight) -> Prepared:
    """Pack a weight [out, in] if this torch and CPU have the packed product in its type."""
    if isinstance(weight, QuantizedWeight):
        return weight
    if weight.device.type != "cpu" or not has_packed_product(weight.dtype):
        return weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    small = weight.dtype == torch.float32 and weight.numel() <= _PLAIN_ELEMENTS
    return Packed(packed, weight if small else None)


def apply(x: Tensor, weight: Prepared, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for x [T, in]."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return _quantized(x, weight, bias)
    if weight.plain is not None and len(x) == 1:
        return F.linear(x, weight.plain, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
    return y


def _quantized(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    y = x.new_empty((len(x), weight.shape[0]))
    wide, scale = x, None
    if weight.activation_bits == 8:
        wide, scale = quantize_rows(x, in_fp8=weight.in_fp8)
    step = max(1, _DEQUANTIZED_ELEMENTS // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        product = F.linear(wide, weight.rows(begin, begin + step).dequantized(wide.dtype))
        y[:, begin : begin + step] = product if scale is None else product * scale
    return y if bias is None else y.add_(bias)


def quantize_rows(x: Tensor, *, in_fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Integers -127..127 or numbers of fp8, as float32 [T, in], and the scale [T, 1] of each row; their product is
    ``x`` [T, in].
    """
    scale = x.float().abs().amax(-1, keepdim=True) / (FP8_LARGEST if in_fp8 else 127)
    scaled = x.float() / scale.where(scale > 0, 1.0)
    if in_fp8:
        return scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8).float(), scale
    return scaled.round_(), scale


def has_packed_product(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have oneDNN's product in ``dtype``.

    In bfloat16, x86 CPUs need AVX-512 or AVX-NE-CONVERT for it.
    """
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return dtype == torch.float32
