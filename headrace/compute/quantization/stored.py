"""What a reader of weights needs of a format on disk: which tensors a linear has, and what weight they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from headrace.compute.quantization.weight import QuantizedWeight


class LinearLayout(Protocol):
    """How one linear is stored: as tensors called by the module's name, a dot, and these suffixes."""

    @property
    def required(self) -> tuple[str, ...]:
        """Suffixes of the tensors that must be there."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Those that may be there."""

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | QuantizedWeight:
        """The weight [out, in] from its parts by suffix; plain where it can only be computed so.

        Raises:
            ValueError: the parts do not fit each other or ``shape``.
        """


class StoredFormat(Protocol):
    """The quantization of a whole checkpoint, as its config tells it."""

    @property
    def name(self) -> str:
        """As users know it: gptq, awq, compressed-tensors, fp8."""

    def layout_of(self, module: str) -> LinearLayout | None:
        """How a linear is stored; None: plainly, as ``.weight``."""
