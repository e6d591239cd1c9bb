"""Loads a draft model with the target's device, data type and kernels, and its sizes for the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headrace.compute.device import device_facts
from headrace.compute.drafting.draft_model import CATCH_UP_TOKENS, DraftModel
from headrace.compute.kernels import Kernels
from headrace.compute.kv import PagedKV, bytes_per_block
from headrace.compute.memory_plan import DraftSize, check_room
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.hub import resolve_model
from headrace.compute.model.shape import ModelShape
from headrace.compute.model.spec import ModelError
from headrace.compute.model.weights import dummy_weights, load_weights, read_spec
from headrace.config import ConfigError
from headrace.config.objects import SpeculativeConfig
from headrace.core.capacity import activation_bytes, blocks_needed

ROW_TOKENS = 16
"""Maximum tokens of a caught-up row in a pass, for the estimate of the activations."""


class Beside(NamedTuple):
    """The target model with its device, dtype and kernels, which the draft model also uses."""

    shape: ModelShape
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kernels: Kernels
    embedding: torch.Tensor | None
    head: Any  # as the kernels prepared it


class StepSizes(NamedTuple):
    """The limits of a step of the target, and its block size."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its weights, without pages yet. It continues sequences of up to ``max_model_len`` tokens."""

    name: str
    decoder: Decoder
    max_model_len: int
    device: torch.device
    kv_dtype: torch.dtype
    most: int

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.decoder.nbytes

    def size(self, sizes: StepSizes) -> DraftSize:
        """Its sizes for the memory plan."""
        shape, (block_size, max_num_seqs, _) = self.decoder.shape, sizes
        return DraftSize(
            weight_bytes=self.decoder.nbytes,
            block_bytes=bytes_per_block(shape, block_size, self.kv_dtype),
            activation_bytes=activation_bytes(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                vocab_size=shape.vocab_size,
                itemsize=self.decoder.dtype.itemsize,
                max_num_batched_tokens=CATCH_UP_TOKENS[self.device.type] + ROW_TOKENS * max_num_seqs,
                max_num_seqs=max_num_seqs,
            ),
            most_blocks=max_num_seqs * blocks_needed(self.max_model_len, block_size),
        )

    def proposer(self, num_blocks: int, sizes: StepSizes, warn: Callable[[str], None]) -> DraftModel:
        """The proposer, with pages of ``num_blocks`` blocks; ``warn`` receives why drafting was disabled."""
        kv = PagedKV(self.decoder.shape, num_blocks, sizes.block_size, self.kv_dtype, self.device)
        return DraftModel(self.decoder, kv, max_model_len=self.max_model_len, warn=warn, most=self.most)


def load_draft(config: SpeculativeConfig, target: Beside, dummy_seed: int | None = None) -> LoadedDraft:
    """Load the draft model that ``config`` names, beside the loaded ``target``.

    ``dummy_seed`` draws random weights.

    Raises:
        ConfigError: there is no such model, its vocabulary is of another size, or its weights do not fit.
    """
    name, quantization = config.model, config.quantization
    assert name is not None
    try:
        folder = resolve_model(name, config.revision, with_weights=dummy_seed is None)
        spec = read_spec(folder)
        _check_vocabulary(name, spec.vocab_size, target.shape.vocab_size)
        max_model_len = min(target.max_model_len, spec.reach)
        each = 0.5 if spec.stored or quantization else target.dtype.itemsize
        room = device_facts(target.device), int(spec.num_parameters * each), spec.shape.position_bytes
        check_room(*room, max_model_len)
        if dummy_seed is None:
            computed = (target.dtype, target.device, quantization)
            weights = load_weights(folder, spec, *computed, fp8=target.kernels.fp8)
        else:
            weights = dummy_weights(spec, target.dtype, target.device, dummy_seed, quantization)
        decoder = Decoder(spec, weights, target.kernels, max_model_len)
    except (ModelError, ConfigError) as error:
        raise ConfigError(f"--speculative-config: draft model: {error}") from error
    return LoadedDraft(
        name, decoder, max_model_len, target.device, target.kv_dtype, config.num_speculative_tokens
    )


def _check_vocabulary(name: str, drafts: int, target: int) -> None:
    if drafts != target:
        raise ConfigError(
            f"{name} has a vocabulary of {drafts:,} tokens and the model one of {target:,}; a draft model needs the"
            " same vocabulary"
        )
