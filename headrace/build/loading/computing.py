"""Loads a decoder: device, dtype, kernels and weights; or rank 0's part of one, and starts the other ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.build.loading.ranks import open_others, ranks_here, size_option
from headrace.compute.device import (
    DeviceFacts,
    DtypeChoice,
    device_facts,
    keep_freed_memory,
    limit_threads,
    resident_bytes,
    resolve_device,
    resolve_dtype,
    return_freed_memory,
)
from headrace.compute.drafting.loading import Beside
from headrace.compute.kernels import Kernels, check_fp8, select
from headrace.compute.kv import KV_DTYPES, bytes_per_block
from headrace.compute.memory_plan import ModelSize, check_room
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.shape import ModelShape
from headrace.compute.model.sharding import Place, check_sizes, shard_of
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights, kv_fingerprint, read_spec
from headrace.compute.parallel import ONE_PROCESS
from headrace.config import ConfigError, ModelOptions
from headrace.fleet.leader import Leader
from headrace.fleet.others import RankFailed
from headrace.fleet.setup import ModelSetup, dtype_name, identity
from headrace.fleet.worker import load_part


class Computing(NamedTuple):
    """A loaded decoder, with its device and number formats.

    ``shape`` is that of the whole model, and ``decoder`` the part of this process at ``place``; ``leader`` is its
    connection to the other ranks. ``embedding`` is the table that a draft head may share. ``facts`` are the device's
    before loading.
    """

    shape: ModelShape
    max_model_len: int
    device: torch.device
    facts: DeviceFacts
    choice: DtypeChoice
    kv_dtype: torch.dtype
    kernels: Kernels
    decoder: Decoder
    embedding: torch.Tensor
    quantization: str
    notes: tuple[str, ...]
    fingerprint: str
    process_bytes: int
    place: Place
    leader: Leader | None

    def size(self, block_size: int) -> ModelSize:
        """The sizes of this process's part for the memory plan."""
        part = self.decoder.shape
        return ModelSize(
            weight_bytes=self.decoder.nbytes,
            block_bytes=bytes_per_block(part, block_size, self.kv_dtype),
            hidden_size=part.hidden_size,
            intermediate_size=part.intermediate_size,
            vocab_size=part.vocab_size,
            itemsize=self.choice.dtype.itemsize,
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


class _Choices(NamedTuple):
    """The choices that are made before weights are read."""

    spec: DecoderSpec
    max_model_len: int
    device: torch.device
    facts: DeviceFacts
    dtype: DtypeChoice
    kernels: Kernels


def load_computing(model: ModelOptions, folder: Path, *, with_fingerprint: bool) -> Computing:
    """Choose device, dtype and kernels, then load the weights.

    Raises:
        ConfigError: an option cannot be satisfied, or another rank has failed.
        ModelError: the model cannot be loaded.
    """
    place = Place(0, model.tensor_parallel_size, model.pipeline_parallel_size)
    chosen = _choose(model, folder, place)
    spec, length, device, facts, choice, kernels = chosen
    process_bytes = resident_bytes() if device.type == "cpu" else 0
    setup = _setup(model, folder, place, chosen, with_fingerprint=with_fingerprint)
    leader = None
    try:
        if place.size > 1:
            leader = Leader(open_others(model), setup, spec.vocab_size, device)
            leader.connect()
        shard = shard_of(spec, place)
        weights = load_part(setup, shard, device, fp8=kernels.fp8 and place.size == 1)
        fingerprint = kv_fingerprint(weights, spec, length) if with_fingerprint else ""
        decoder = Decoder(shard, weights, kernels, length, leader or ONE_PROCESS)
        return_freed_memory()
        if leader is not None:
            leader.loaded()
            if with_fingerprint:
                parts = " ".join([fingerprint, *leader.fingerprints])
                fingerprint = hashlib.sha256(parts.encode()).hexdigest()
    except BaseException as error:
        if leader is not None:
            leader.close()
        if isinstance(error, RankFailed):
            raise ConfigError(f"{size_option(place)}: {error}") from error
        raise
    return Computing(
        shape=spec.shape,
        max_model_len=length,
        device=device,
        facts=facts,
        choice=choice,
        kv_dtype=KV_DTYPES.get(model.kv_cache_dtype, choice.dtype),
        kernels=kernels,
        decoder=decoder,
        embedding=weights.embedding,
        quantization=weights.quantization,
        notes=(choice.reason, _stored_note(spec, weights)),
        fingerprint=fingerprint,
        process_bytes=process_bytes,
        place=place,
        leader=leader,
    )


def _stored_note(spec: DecoderSpec, weights: DecoderWeights) -> str:
    """A note on weights that are stored in fewer bits than they are computed with; empty: none."""
    if spec.stored is None or weights.quantization:
        return ""
    return f"{spec.stored.name}: weights are stored in fewer bits than are used for computing"


def _choose(model: ModelOptions, folder: Path, place: Place) -> _Choices:
    """Choose device, dtype and kernels; refuses impossible options before anything is loaded."""
    spec = read_spec(folder)
    check_sizes(spec, place.tensor_size, place.pipeline_size)
    shape = spec.shape
    length = _max_model_len(model, shape)
    device = resolve_device(model.device)
    here = ranks_here(place)
    if device.type == "cuda" and torch.cuda.device_count() < here:
        raise ConfigError(
            f"{size_option(place)}: {here} ranks of this machine need a GPU each, and torch sees"
            f" {torch.cuda.device_count()}"
        )
    torch.set_num_threads(max(1, limit_threads() // here))
    keep_freed_memory()
    facts = device_facts(device)
    quantized = bool(spec.stored or model.quantization)
    choice = resolve_dtype(model.dtype, shape.dtype, facts, quantized=quantized)
    each = 0.5 if quantized else choice.dtype.itemsize  # four bits are the smallest format
    parts = here if device.type == "cpu" else 1
    check_room(facts, int(shape.num_parameters * each * parts / place.size), shape.position_bytes, length)
    isa = None if model.cpu_isa == "auto" else model.cpu_isa
    kernels = select(model.kernels, device, isa, dtype=choice.dtype, heads=shape.heads)
    check_fp8(kernels, "quantization", model.quantization)
    check_fp8(kernels, "kv-cache-dtype", model.kv_cache_dtype)
    return _Choices(spec, length, device, facts, choice, kernels)


def _setup(
    model: ModelOptions, folder: Path, place: Place, chosen: _Choices, *, with_fingerprint: bool
) -> ModelSetup:
    return ModelSetup(
        place=place,
        local_rank=0,
        host="",
        port=0,
        address="127.0.0.1",
        folder=str(folder),
        identity=identity(folder) if place.size > 1 else "",
        dtype=dtype_name(chosen.dtype.dtype),
        device=chosen.device.type,
        kernels=chosen.kernels.name,
        cpu_isa=None if model.cpu_isa == "auto" else model.cpu_isa,
        quantization=model.quantization,
        dummy_seed=model.seed if model.load_format == "dummy" else None,
        max_model_len=chosen.max_model_len,
        threads=torch.get_num_threads(),
        with_fingerprint=with_fingerprint,
    )


def _max_model_len(model: ModelOptions, shape: ModelShape) -> int:
    if model.max_model_len is None:
        return shape.max_positions
    if model.max_model_len > shape.reach:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: the model supports positions up to {shape.reach}"
        )
    return model.max_model_len
