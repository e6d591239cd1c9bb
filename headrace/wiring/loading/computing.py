"""Loads a decoder: finds the model, chooses device, dtype and kernels, and reads the weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
from headrace.compute.drafting.loading import Beside, LoadedDraft, LoadedHead, load_draft, load_head
from headrace.compute.kernels import Kernels, check_fp8, select, weight_element_bytes
from headrace.compute.memory_plan import ModelSize, check_room
from headrace.compute.model.decoder import Decoder, ModelDecoder
from headrace.compute.model.families import UnknownArchitecture
from headrace.compute.model.gguf.file import is_gguf
from headrace.compute.model.kv import KV_DTYPES, bytes_per_block
from headrace.compute.model.shape import LayerGroups, ModelShape
from headrace.compute.model.sharding import EXPERT, PIPELINE, TENSOR, Place, check_sizes, shard_of
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights, kv_fingerprint, read_spec
from headrace.compute.parallel import ONE_PROCESS
from headrace.compute.quantization.scheme import SCHEMES
from headrace.config import CacheOptions, ConfigError, ModelOptions, Options
from headrace.core.capacity import NO_WINDOWS
from headrace.fleet.leader import Leader
from headrace.fleet.messages import ModelSetup, dtype_name, identity
from headrace.fleet.others import RankFailed
from headrace.fleet.worker import load_part
from headrace.wiring.drafting import speculation
from headrace.wiring.loading.ranks import open_others, place_of, ranks_here, size_option

if TYPE_CHECKING:
    from headrace.compute.adopted.loading import Adoptable

# Loads a model that transformers defines: see `headrace.compute.adopted`, which is imported only for such a
# model.


@dataclass(frozen=True, slots=True)
class AdoptedModel:
    """A model in a folder that transformers defines; ``why`` says why it is not of a native family."""

    found: Adoptable
    why: str

    @property
    def shape(self) -> ModelShape:
        """Its sizes; its layers are an estimate until it is loaded."""
        return self.found.shape

    @property
    def stored_quantized(self) -> bool:
        """Whether linear layers are stored quantized."""
        return self.found.stored is not None

    def check(self, model: ModelOptions) -> None:
        """Raise ConfigError for options that need a native family."""
        for option, size in (
            (TENSOR, model.tensor_parallel_size),
            (PIPELINE, model.pipeline_parallel_size),
        ):
            if size > 1:
                raise ConfigError(
                    f"{option} {size}: {self.shape.architecture} is computed by transformers' code, which runs in one"
                    " process; omit this option"
                )
        if model.enable_expert_parallel:
            raise ConfigError(f"{EXPERT}: {self.shape.architecture} runs in one process; omit this option")

    def open(self, model: ModelOptions, chosen: Choices, *, with_fingerprint: bool) -> Opened:
        """See `FoundModel.open`."""
        from headrace.compute.adopted.loading import load_adopted

        scheme = model.quantization
        loaded = load_adopted(
            self.found,
            chosen.kernels,
            chosen.dtype.dtype,
            chosen.device,
            chosen.max_model_len,
            model.seed if model.load_format == "dummy" else None,
            scheme=SCHEMES[scheme] if scheme else None,
            with_digest=with_fingerprint,
        )
        fingerprint = ""
        if with_fingerprint:
            config = json.dumps(self.found.config.to_dict(), sort_keys=True, default=str)
            described = "transformers", version("transformers"), scheme, loaded.digest, config
            fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()
        decoder = loaded.decoder
        kernels = ", ".join(["attention", *(f"{kind} ({count})" for kind, count in loaded.replaced.items())])
        note = (
            f"modelling code of transformers {version('transformers')}, {self.why}; by the kernels: {kernels}"
        )
        stored = self.found.stored
        held = stored.name if stored else scheme
        quantization = f"linear layers in {held}" if held else ""
        return Opened(decoder.shape, decoder, None, quantization, fingerprint, (note,))


def find_adopted(folder: Path, why: str) -> AdoptedModel:
    """The model in a folder, as transformers defines it.

    Raises:
        ConfigError: transformers is not installed.
        ModelError: transformers has no such model, or one that cannot be served.
    """
    try:
        from headrace.compute.adopted.loading import read_adoptable
    except ModuleNotFoundError as error:
        raise ConfigError(f"--model-impl: models of transformers need the package {error.name}") from error
    return AdoptedModel(read_adoptable(folder), why)


# Loads a model of one of this project's families: whole, or rank 0's part of it, and then starts the other
# ranks.


@dataclass(frozen=True, slots=True)
class NativeModel:
    """A model of a native family in a folder."""

    folder: Path
    spec: DecoderSpec

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return self.spec.shape

    @property
    def stored_quantized(self) -> bool:
        """Whether its linears are stored in a quantized format."""
        return self.spec.stored is not None

    def check(self, model: ModelOptions) -> None:
        """Raise ModelError if the model cannot be divided as the options ask."""
        check_sizes(self.spec, place_of(model))

    def open(self, model: ModelOptions, chosen: Choices, *, with_fingerprint: bool) -> Opened:
        """See `FoundModel.open`."""
        place = place_of(model)
        setup = self._setup(model, place, chosen, with_fingerprint=with_fingerprint)
        kernels, length, leader = chosen.kernels, chosen.max_model_len, None
        try:
            if place.size > 1:
                leader = Leader(open_others(model), setup, self.spec.vocab_size, chosen.device)
                leader.connect()
            shard = shard_of(self.spec, place)
            weights = load_part(setup, shard, chosen.device, fp8=kernels.fp8 and place.size == 1)
            fingerprint = kv_fingerprint(weights, self.spec, length) if with_fingerprint else ""
            decoder = Decoder(shard, weights, kernels, length, leader or ONE_PROCESS, greedy=True)
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
        notes = (self._stored_note(weights),)
        return Opened(
            self.shape, decoder, weights.embedding, weights.quantization, fingerprint, notes, leader
        )

    def _stored_note(self, weights: DecoderWeights) -> str:
        """A note on weights that are stored in fewer bits than they are computed with; empty: none."""
        if self.spec.stored is None or weights.quantization:
            return ""
        return f"{self.spec.stored.name}: weights are stored in fewer bits than are used for computing"

    def _setup(
        self, model: ModelOptions, place: Place, chosen: Choices, *, with_fingerprint: bool
    ) -> ModelSetup:
        return ModelSetup(
            place=place,
            local_rank=0,
            host="",
            port=0,
            address="127.0.0.1",
            folder=str(self.folder),
            identity=identity(self.folder) if place.size > 1 else "",
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


# What a loader of models must do: the seam between the families of this project and those of transformers.


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
    isa = None if model.cpu_isa == "auto" else model.cpu_isa
    kernels = select(model.kernels, device, isa, dtype=choice.dtype, heads=shape.heads)
    # Four bits are the smallest format.
    each = 0.5 if quantized else weight_element_bytes(kernels, choice.dtype, shape.dtype)
    parts = here if device.type == "cpu" else 1
    check_room(facts, int(shape.num_parameters * each * parts / place.size), shape.position_bytes, length)
    check_fp8(kernels, "quantization", model.quantization)
    kv_dtype = _kv_dtype(model, choice.dtype, kernels, shape)
    return Choices(length, device, choice, kv_dtype, kernels), facts


def _kv_dtype(model: ModelOptions, dtype: torch.dtype, kernels: Kernels, shape: ModelShape) -> torch.dtype:
    """The dtype of keys and values by ``--kv-cache-dtype``, if ``kernels`` compute in ``dtype``."""
    name = model.kv_cache_dtype
    check_fp8(kernels, "kv-cache-dtype", name)
    latent = any(layer.latent for layer in shape.layers)
    narrow = dtype == torch.float32 and kernels.narrow_pages
    if name == "auto":
        # A checkpoint in bfloat16 has keys and values in bfloat16, also where only its products are in float32.
        wanted = model.dtype == "auto" and shape.dtype == "bfloat16"
        return torch.bfloat16 if wanted and narrow and not latent else dtype
    kept = KV_DTYPES[name]
    computed = str(dtype).removeprefix("torch.")
    if kept != dtype and latent:
        raise ConfigError(
            f"--kv-cache-dtype {name}: {shape.architecture} keeps latents, which are stored as they are computed, here"
            f" in {computed}; omit this option"
        )
    if kept == torch.bfloat16 and kept != dtype and not narrow:
        raise ConfigError(
            f"--kv-cache-dtype bfloat16: kernels '{kernels.name}' compute in {computed}, and read such keys and values"
            " only with --dtype bfloat16 or, with the kernels cpp and torch, float32"
        )
    return kept


def _max_model_len(model: ModelOptions, shape: ModelShape) -> int:
    if model.max_model_len is None:
        return shape.max_positions
    if model.max_model_len > shape.reach:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: the model supports positions up to {shape.reach}"
        )
    return model.max_model_len


@freeing_at_once()
def load_drafting(options: Options, target: Beside) -> LoadedDraft | LoadedHead | None:
    """The draft model or head that the options name; None if they name neither.

    Raises:
        ConfigError: it cannot be loaded, does not fit ``target``, or does not work with other options.
    """
    config = speculation(options.scheduler)
    if config is None or config.model is None:
        return None
    seed = options.model.seed if options.model.load_format == "dummy" else None
    if not config.has_head:
        return load_draft(config, target, seed)
    _check_tiers(options.cache)
    return load_head(config, target, seed)


def _check_tiers(cache: CacheOptions) -> None:
    if cache.kv_offload_bytes or cache.kv_offload_path is not None:
        raise ConfigError(
            "--speculative-config: method eagle3 keeps keys and values in the blocks of the device; omit"
            " --kv-offload-bytes and --kv-offload-path"
        )
