"""Sources of a decoder's weights by the names of a checkpoint: its files, or random numbers."""

from __future__ import annotations

import zlib
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from headrace.compute.model.checkpoint import Checkpoint
from headrace.compute.model.layout import EMBEDDING
from headrace.compute.model.spec import DecoderSpec, ModelError
from headrace.compute.quantization.stored import LinearLayout
from headrace.compute.quantization.weight import QuantizedWeight

Weight: TypeAlias = Tensor | QuantizedWeight


class Source(Protocol):
    """A source of weights."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def linear(self, module: str, shape: tuple[int, int]) -> Weight: ...

    def embedding(self, shape: tuple[int, int]) -> Weight:
        """The table of the tokens' embeddings [vocab, hidden], which may be quantized."""


class StoredSource:
    """A checkpoint, whose linear layers may be stored in a quantized format; fp8 is expanded unless ``fp8``."""

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec, *, fp8: bool) -> None:
        self._checkpoint = checkpoint
        self._format = spec.stored
        self._fp8 = fp8

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(name, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        layout = self._format.layout_of(module) if self._format else None
        if layout is None:
            return self.tensor(f"{module}.weight", shape)
        weight = read_linear(self._checkpoint, layout, module, shape)
        expanded = isinstance(weight, QuantizedWeight) and weight.in_fp8 and not self._fp8
        return weight.dequantized() if isinstance(weight, QuantizedWeight) and expanded else weight

    def embedding(self, shape: tuple[int, int]) -> Tensor:
        return self.tensor(f"{EMBEDDING}.weight", shape)


def parts_of(checkpoint: Checkpoint, layout: LinearLayout, module: str) -> dict[str, str]:
    """The names of the tensors in which a checkpoint stores a linear layer, by their suffixes."""
    names = {suffix: f"{module}.{suffix}" for suffix in (*layout.required, *layout.optional)}
    return {suffix: name for suffix, name in names.items() if name in checkpoint.names}


def read_linear(checkpoint: Checkpoint, layout: LinearLayout, module: str, shape: tuple[int, int]) -> Weight:
    """The weight [out, in] of a linear layer that is stored quantized.

    Raises:
        ModelError: its tensors do not fit the layout.
    """
    parts = parts_of(checkpoint, layout, module)
    try:
        return layout.read({suffix: checkpoint.read(name) for suffix, name in parts.items()}, shape)
    except ValueError as error:
        raise ModelError(f"{checkpoint.folder}: {module}: {error}") from error


class RandomSource:
    """Noise for every linear layer and table, which depends on its name and the seed, and ones for the norms."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self._generator = torch.Generator(device=device)
        self._seed = seed
        self._dtype = dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(("norm.weight", "layernorm.weight")):
            return torch.ones(shape)
        self._generator.manual_seed(zlib.crc32(name.encode(), self._seed))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._generator.device)
        return tensor.normal_(0.0, 0.02, generator=self._generator)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        return self.tensor(f"{module}.weight", shape)

    def embedding(self, shape: tuple[int, int]) -> Tensor:
        return self.tensor(f"{EMBEDDING}.weight", shape)
