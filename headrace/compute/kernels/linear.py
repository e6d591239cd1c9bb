"""Linear layers in torch: on a CPU through oneDNN with prepacked weights, elsewhere as torch does it.

The BLAS behind torch's float32 matrix product takes a slow path on some x86 processors; oneDNN with weights
packed once is two to four times faster there from four rows on, and in bfloat16 for any number. A single row
is quicker plain where the matrix is small, because entering oneDNN costs more than the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_PLAIN_ELEMENTS = 1 << 20
"""Up to this size a float32 matrix is kept plain too, for single rows (4 MiB)."""
_PACKED_ROWS = 64
"""Rows that the packed layout is chosen for; it serves other numbers as well."""


class Packed(NamedTuple):
    """A weight in oneDNN's layout, and, where single rows are quicker that way, plain."""

    packed: Tensor
    plain: Tensor | None


def prepare(weight: Tensor) -> Tensor | Packed:
    """Pack a weight [out, in] if this torch and device have the packed product."""
    types = (torch.float32, torch.bfloat16)
    if weight.device.type != "cpu" or weight.dtype not in types or not _has_packed_product():
        return weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    small = weight.dtype == torch.float32 and weight.numel() <= _PLAIN_ELEMENTS
    return Packed(packed, weight if small else None)


def apply(x: Tensor, weight: Tensor | Packed, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for x [T, in]."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if weight.plain is not None and len(x) == 1:
        return F.linear(x, weight.plain, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
    return y


def _has_packed_product() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
