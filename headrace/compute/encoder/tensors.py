"""The tensors of an encoder's checkpoint by their Hugging Face names, and the layers that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.kernels import Kernels
from headrace.compute.model.checkpoint import Checkpoint
from headrace.compute.model.spec import ModelError


class Linear(NamedTuple):
    """A linear layer in the kernels' form."""

    kernels: Kernels
    weight: Any  # as the kernels prepared it
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)


class Norm(NamedTuple):
    """A layer norm (arXiv:1607.06450), with or without a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Tensors:
    """The tensors below ``prefix``; each must have the shape that is asked for.

    Args:
        tensors: all of the checkpoint.
        prefix: what the names begin with.
        kernels, device: where the layers are computed, in float32.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], prefix: str, kernels: Kernels, device: torch.device
    ) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self._kernels = kernels
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def below(self, prefix: str) -> Tensors:
        """The same checkpoint with another prefix."""
        return Tensors(self._tensors, prefix, self._kernels, self._device)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return self._prefix + name in self._tensors

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32.

        Raises:
            ModelError: it is missing or has another shape.
        """
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            raise ModelError(f"the encoder's weights lack {self._prefix}{name}")
        if tensor.shape != shape:
            raise ModelError(f"{self._prefix}{name} is {list(tensor.shape)}, the config says {list(shape)}")
        return tensor.to(self._device, torch.float32)

    def table(self, name: str, width: int) -> Tensor:
        """A table of rows of ``width`` elements."""
        return self.get(name, len(self._tensors[self._prefix + name]), width)

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> Norm:
        """A layer norm."""
        return Norm(self.get(f"{name}.weight", size), self.get(f"{name}.bias", size) if bias else None, eps)

    def linear(self, outputs: int, inputs: int, *names: str, bias: bool = True) -> Linear:
        """A linear layer; with several ``names``, their outputs one after the other, ``outputs`` each."""
        weight = torch.cat([self.get(f"{name}.weight", outputs, inputs) for name in names])
        biases = torch.cat([self.get(f"{name}.bias", outputs) for name in names]) if bias else None
        return Linear(self._kernels, self._kernels.prepare_linear(weight), biases)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors.

    Raises:
        ModelError: there are none (pickled weights are not opened), or a file is damaged.
    """
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def prefix_before(tensors: Mapping[str, Tensor], anchor: str) -> str:
    """What stands before ``anchor`` in the checkpoint's names: ``bert.``, or nothing."""
    return next((name[: -len(anchor)] for name in tensors if name.endswith(anchor)), "")
