"""The kernels inside the modules that encode images: their linear layers, in parts between which a slice may end.

torch packs a weight again at each call, and its threads meet at a barrier after each operation. The kernels pack it
once, and share their work between threads of their own. See
docs/decisions/models.md#linear-layers-of-the-image-encoder.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from headrace.compute.adopted.modules import replace
from headrace.compute.images.slices import rows_of_a_part
from headrace.compute.kernels import Kernels


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Let the kernels compute the linear layers of a model without its text layers; its weights in them are freed.

    Raises:
        ModelError: the kernels give another result than a layer.
    """
    replace(model, cast(Kernels, _KernelsInParts(kernels)), name="the image encoder")


class _Sized(NamedTuple):
    """A prepared weight, and the most rows that a part of its product has."""

    weight: Any
    rows: int


class _KernelsInParts:
    """Kernels whose linear layers are computed in parts of rows: see `slices`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def prepare_linear(self, weight: Tensor) -> _Sized:
        """See `Kernels.prepare_linear`."""
        return _Sized(self._kernels.prepare_linear(weight), rows_of_a_part(weight.numel()))

    def linear(self, x: Tensor, weight: _Sized, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        parts = [self._kernels.linear(part, weight.weight, bias) for part in torch.split(x, weight.rows)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
