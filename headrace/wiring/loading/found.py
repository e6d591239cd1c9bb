"""What a loader of models must do: the seam between the families of this project and those of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from headrace.compute.device import DtypeChoice
from headrace.compute.kernels import Kernels
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.shape import ModelShape
from headrace.config import ModelOptions
from headrace.fleet.leader import Leader


class Choices(NamedTuple):
    """The choices that are made before weights are read."""

    max_model_len: int
    device: torch.device
    dtype: DtypeChoice
    kv_dtype: torch.dtype
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class Opened:
    """A model with its weights; ``shape`` is the whole model's, ``leader`` connects to the other ranks.

    ``embedding`` is the table that a draft head may share (None: it cannot read this model's states).
    ``quantization`` is the number of linear layers of each kind, empty if none is quantized.
    """

    shape: ModelShape
    decoder: ModelDecoder
    embedding: torch.Tensor | None
    quantization: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    leader: Leader | None = None


class FoundModel(Protocol):
    """A model whose config is read, before its weights are."""

    @property
    def shape(self) -> ModelShape:
        """Its sizes according to the config."""
        ...

    @property
    def stored_quantized(self) -> bool:
        """Whether its weights are stored in fewer bits than a number of the computation."""
        ...

    def check(self, model: ModelOptions) -> None:
        """Raise ConfigError or ModelError for options that it does not support."""
        ...

    def open(self, model: ModelOptions, chosen: Choices, *, with_fingerprint: bool) -> Opened:
        """Load the weights.

        Raises:
            ConfigError: another rank has failed.
            ModelError: the model cannot be loaded.
        """
        ...
