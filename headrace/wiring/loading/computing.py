"""Loads a decoder: finds the model, chooses device, dtype and kernels, and reads the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.compute.device import (
    DeviceFacts,
    DtypeChoice,
    device_facts,
    freeing_at_once,
    limit_threads,
    resident_bytes,
    resolve_device,
    resolve_dtype,
)
from headrace.compute.drafting.loading import Beside
from headrace.compute.kernels import Kernels, check_fp8, select
from headrace.compute.memory_plan import ModelSize, check_room
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.families import UnknownArchitecture
from headrace.compute.model.gguf.file import is_gguf
from headrace.compute.model.kv import KV_DTYPES, bytes_per_block
from headrace.compute.model.shape import ModelShape
from headrace.compute.model.sharding import Place
from headrace.compute.model.weights import read_spec
from headrace.compute.model.window_groups import LayerGroups
from headrace.config import ConfigError, ModelOptions
from headrace.core.capacity import NO_WINDOWS
from headrace.fleet.leader import Leader
from headrace.wiring.loading.adopted import find_adopted
from headrace.wiring.loading.found import Choices, FoundModel
from headrace.wiring.loading.native import NativeModel
from headrace.wiring.loading.ranks import place_of, ranks_here, size_option


class Computing(NamedTuple):
    """A loaded decoder, with its device and number formats.

    ``shape`` is that of the whole model, and ``decoder`` the part of this process at ``place``; ``leader`` is its
    connection to the other ranks. ``embedding`` is the table that a draft head may share. ``facts`` are the device's
    before loading. ``image_bytes`` are those of the image encoder with its cache.
    """

    shape: ModelShape
    max_model_len: int
    device: torch.device
    facts: DeviceFacts
    choice: DtypeChoice
    kv_dtype: torch.dtype
    kernels: Kernels
    decoder: ModelDecoder
    embedding: torch.Tensor | None
    quantization: str
    notes: tuple[str, ...]
    fingerprint: str
    process_bytes: int
    place: Place
    leader: Leader | None
    image_bytes: int = 0

    def size(self, block_size: int, adapter_bytes: int = 0, groups: LayerGroups | str = "") -> ModelSize:
        """The sizes of this process's part for the memory plan; adapters and image encoder count as weights.

        ``groups`` are those of window layers, or why there are none.
        """
        part = self.decoder.shape
        used, note = (None, groups) if isinstance(groups, str) else (groups, "")
        return ModelSize(
            weight_bytes=self.decoder.nbytes + adapter_bytes + self.image_bytes,
            block_bytes=bytes_per_block(part, block_size, self.kv_dtype, used),
            hidden_size=part.hidden_size,
            intermediate_size=part.intermediate_size,
            vocab_size=part.vocab_size,
            itemsize=self.choice.dtype.itemsize,
            state_bytes=part.state_bytes,
            layer_state_bytes=part.state_bytes // part.recurrent_layers if part.recurrent_layers else 0,
            windows=NO_WINDOWS if used is None else used.windows,
            window_note=note,
        )

    def beside(self) -> Beside:
        """The target that a draft model or head must fit."""
        computed = self.device, self.choice.dtype, self.kv_dtype, self.kernels
        return Beside(self.shape, self.max_model_len, *computed, self.embedding, self.decoder.head)

    def free_facts(self) -> DeviceFacts:
        """The current facts of the device; ranks that share a CPU divide the free memory."""
        facts, ranks = device_facts(self.device), ranks_here(self.place)
        shared = self.device.type == "cpu" and ranks > 1
        return replace(facts, free_bytes=facts.free_bytes // ranks) if shared else facts


def find_model(model: ModelOptions, folder: Path) -> FoundModel:
    """The model in a folder or GGUF file by ``--model-impl``: of a native family, or as transformers defines it.

    Raises:
        ConfigError: transformers is not installed, or cannot read the model, which is a GGUF file.
        ModelError: the implementation does not support the model, or a file is broken.
    """
    if model.model_impl == "transformers" and is_gguf(folder):
        raise ConfigError(
            "--model-impl transformers: only native families read GGUF files; leave the option out"
        )
    if model.model_impl == "transformers":
        return find_adopted(folder, "as --model-impl says")
    try:
        spec = read_spec(folder)
        return NativeModel(folder, spec)
    except UnknownArchitecture as error:
        if model.model_impl == "native":
            raise
        return find_adopted(folder, f"because {error.why}")


def load_computing(model: ModelOptions, folder: Path, *, with_fingerprint: bool) -> Computing:
    """Choose device, dtype and kernels, then load the weights.

    Raises:
        ConfigError: an option cannot be satisfied, or another rank has failed.
        ModelError: the model cannot be loaded.
    """
    place = place_of(model)
    found = find_model(model, folder)
    chosen, facts = _choose(model, found, place)
    process_bytes = resident_bytes() if chosen.device.type == "cpu" else 0
    with freeing_at_once():
        opened = found.open(model, chosen, with_fingerprint=with_fingerprint)
    return Computing(
        shape=opened.shape,
        max_model_len=chosen.max_model_len,
        device=chosen.device,
        facts=facts,
        choice=chosen.dtype,
        kv_dtype=chosen.kv_dtype,
        kernels=chosen.kernels,
        decoder=opened.decoder,
        embedding=opened.embedding,
        quantization=opened.quantization,
        notes=(chosen.dtype.reason, *opened.notes),
        fingerprint=opened.fingerprint,
        process_bytes=process_bytes,
        place=place,
        leader=opened.leader,
    )


def _choose(model: ModelOptions, found: FoundModel, place: Place) -> tuple[Choices, DeviceFacts]:
    """Choose device, dtype and kernels; refuses impossible options before anything is loaded."""
    found.check(model)
    shape = found.shape
    length = _max_model_len(model, shape)
    device = resolve_device(model.device)
    here = ranks_here(place)
    if device.type == "cuda" and torch.cuda.device_count() < here:
        raise ConfigError(
            f"{size_option(place)}: {here} ranks of this machine need a GPU each, and torch sees"
            f" {torch.cuda.device_count()}"
        )
    torch.set_num_threads(max(1, limit_threads() // here))
    facts = device_facts(device)
    quantized = bool(found.stored_quantized or model.quantization)
    choice = resolve_dtype(model.dtype, shape.dtype, facts, quantized=quantized)
    each = 0.5 if quantized else choice.dtype.itemsize  # four bits are the smallest format
    parts = here if device.type == "cpu" else 1
    check_room(facts, int(shape.num_parameters * each * parts / place.size), shape.position_bytes, length)
    isa = None if model.cpu_isa == "auto" else model.cpu_isa
    kernels = select(model.kernels, device, isa, dtype=choice.dtype, heads=shape.heads)
    check_fp8(kernels, "quantization", model.quantization)
    check_fp8(kernels, "kv-cache-dtype", model.kv_cache_dtype)
    if model.kv_cache_dtype in KV_DTYPES and any(layer.latent for layer in shape.layers):
        raise ConfigError(
            f"--kv-cache-dtype {model.kv_cache_dtype}: {shape.architecture} keeps latents, which have no form of 8"
            " bits; omit this option"
        )
    kv_dtype = KV_DTYPES.get(model.kv_cache_dtype, choice.dtype)
    return Choices(length, device, choice, kv_dtype, kernels), facts


def _max_model_len(model: ModelOptions, shape: ModelShape) -> int:
    if model.max_model_len is None:
        return shape.max_positions
    if model.max_model_len > shape.reach:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: the model supports positions up to {shape.reach}"
        )
    return model.max_model_len
