"""The interface of a format on disk: which tensors a linear layer has, and what weight they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from headrace.compute.quantization.weight import QuantizedWeight


class LinearLayout(Protocol):
    """How one linear layer is stored: as tensors named by the module's name, a dot, and these suffixes."""

    @property
    def required(self) -> tuple[str, ...]:
        """Suffixes of required tensors."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Suffixes of optional tensors."""

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | QuantizedWeight:
        """The weight [out, in] from its parts by suffix; not quantized if it can only be computed so.

        Raises:
            ValueError: the parts do not fit each other or ``shape``.
        """


class StoredFormat(Protocol):
    """The quantization of a whole checkpoint, as described in its config."""

    @property
    def name(self) -> str:
        """The public name: gptq, awq, compressed-tensors, fp8."""

    def layout_of(self, module: str) -> LinearLayout | None:
        """How a linear layer is stored; None: not quantized, as ``.weight``."""
