"""The weights of a decoder: assembled layer by layer, from a checkpoint or at random, and quantized if requested.

The tensors of a checkpoint are read when they are needed, and a linear layer is quantized before the next one is
read. So the memory peak of loading is close to the size of the model as it will run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from headrace.compute.model.checkpoint import Checkpoint, listed
from headrace.compute.model.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LinearPlace,
    head_norm_modules,
    linear_modules,
    linear_places,
    norm_modules,
    other_tensors,
)
from headrace.compute.model.spec import DecoderSpec, ModelError
from headrace.compute.quantization import scheme as quantization
from headrace.compute.quantization.scheme import SCHEMES, Scheme, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight, stacked

Weight: TypeAlias = Tensor | QuantizedWeight

_SAMPLED = 1024
_HARMLESS = ("rotary_emb.inv_freq",)
_OTHER_PARTS = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Linear weights are [out, in]; norm weights are float32 with the family's offset
    added.

    ``qkv`` stacks queries, keys, values; ``gate_up`` gate, up. ``qk_norm`` is [heads + kv_heads, head_dim].
    """

    input_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Weight
    output_bias: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """All weights; ``head`` is ``embedding`` itself if the model ties them and the head is not quantized.

    The decoder moves the layers out one by one as it prepares them, so that no weight is in memory twice. ``nbytes``
    remains the size of all of them when they were created. ``quantization`` is the number of linear layers of each
    kind (empty: none is quantized).
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Weight
    nbytes: int = field(init=False)
    quantization: str = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors())
        self.quantization = _kinds(self)

    def fingerprint(self) -> str:
        """A digest of every tensor's shape and of elements spread over it, which differs for other weights."""
        digest = hashlib.sha256(self.quantization.encode())
        for tensor in self.tensors():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once; for a quantized weight, its parts."""
        yield self.embedding
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                yield from _tensors(getattr(layer, name))
        yield self.norm
        if self.head is not self.embedding:
            yield from _tensors(self.head)


def load_weights(
    folder: Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    quantize: str | None = None,
    plain_name: Callable[[str], str] | None = None,
    *,
    fp8: bool = False,
) -> DecoderWeights:
    """Read a checkpoint's safetensors, convert them to ``dtype``, and quantize them if ``quantize`` names a scheme.

    ``fp8`` says whether linear layers stored in fp8 stay so, or are expanded.
    ``plain_name`` maps the names in the files to those of the architecture, if they differ.

    Raises:
        ModelError: there are no safetensors, a file is broken, or tensors are missing, unexpected or of another shape
            (the message names them). Or its linear layers are quantized already.
    """
    with Checkpoint(folder, plain_name or (_plain_name if spec.nested_checkpoint else str)) as checkpoint:
        check_names(checkpoint, spec)
        return _Assembly(
            spec, _Stored(checkpoint, spec, fp8 and quantize is None), dtype, device, quantize
        ).weights()


def dummy_weights(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    quantize: str | None = None,
) -> DecoderWeights:
    """Random weights of the model's shape, the same for the same seed and kind of device; for benchmarks."""
    return _Assembly(spec, _Random(dtype, device, seed), dtype, device, quantize).weights()


class _Source(Protocol):
    """A source of weights."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def linear(self, module: str, shape: tuple[int, int]) -> Weight: ...


class _Stored:
    """A checkpoint, whose linear layers may be stored in a quantized format."""

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec, fp8: bool) -> None:
        self._checkpoint = checkpoint
        self._format = spec.stored
        self._fp8 = fp8

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(name, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        layout = self._format.layout_of(module) if self._format else None
        if layout is None:
            return self.tensor(f"{module}.weight", shape)
        suffixes = (*layout.required, *layout.optional)
        names = {suffix: f"{module}.{suffix}" for suffix in suffixes}
        present = {suffix: name for suffix, name in names.items() if name in self._checkpoint.names}
        try:
            weight = layout.read(
                {suffix: self._checkpoint.read(name) for suffix, name in present.items()}, shape
            )
        except ValueError as error:
            raise ModelError(f"{self._checkpoint.folder}: {module}: {error}") from error
        expanded = isinstance(weight, QuantizedWeight) and weight.in_fp8 and not self._fp8
        return weight.dequantized() if isinstance(weight, QuantizedWeight) and expanded else weight


class _Random:
    """Noise for every linear layer and table, ones for the norms."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._dtype = dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(("norm.weight", "layernorm.weight")):
            return torch.ones(shape)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._generator.device)
        return tensor.normal_(0.0, 0.02, generator=self._generator)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        return self.tensor(f"{module}.weight", shape)


class _Assembly:
    """Assembles weights: merges modules, converts dtypes, quantizes linear layers."""

    def __init__(
        self,
        spec: DecoderSpec,
        source: _Source,
        dtype: torch.dtype,
        device: torch.device | str,
        quantize: str | None,
    ) -> None:
        self._spec, self._source, self._dtype, self._device = spec, source, dtype, device
        self._scheme = SCHEMES[quantize] if quantize else None

    def weights(self) -> DecoderWeights:
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        embedding = self._joined([self._source.tensor(f"{EMBEDDING}.weight", shape)])
        layers = [self._layer(index) for index in range(self._spec.num_layers)]
        norm = self._norm(FINAL_NORM)
        head: Weight = embedding
        if not self._spec.tied_embeddings:
            head = self._whole([self._source.linear(HEAD, shape)], quantization.HEAD)
        elif self._scheme:
            head = self._quantized(embedding, quantization.HEAD)
        return DecoderWeights(embedding, layers, norm, head)

    def _layer(self, index: int) -> LayerWeights:
        places = linear_places(self._spec, index)
        linears = {name: self._linear(place) for name, place in places.items()}
        biases = {f"{name}_bias": self._bias(place) for name, place in places.items()}
        norms = {name: self._norm(module) for name, module in norm_modules(self._spec, index).items()}
        absent = dict.fromkeys(("post_attention_norm", "post_mlp_norm"))
        return LayerWeights(qk_norm=self._head_norms(index), **(linears | biases | absent | norms))

    def _linear(self, place: LinearPlace) -> Weight:
        parts = [self._source.linear(module, (rows, place.inputs)) for module, rows in place.modules.items()]
        return self._whole(parts, self._scheme)

    def _whole(self, parts: Sequence[Weight], scheme: Scheme | None) -> Weight:
        """Parts as one weight, quantized if there is a scheme; not quantized if their bits differ."""
        if self._scheme and scheme:
            if any(isinstance(part, QuantizedWeight) for part in parts):
                raise ModelError("--quantization: the checkpoint is already quantized; omit this option")
            parts = [self._quantized(part, scheme) for part in parts if isinstance(part, Tensor)]
        quantized = [part.to(self._device) for part in parts if isinstance(part, QuantizedWeight)]
        if len(quantized) == len(parts):
            try:
                return stacked(quantized) if len(quantized) > 1 else quantized[0]
            except ValueError:  # of different kinds: a stacked weight cannot mix them
                parts = quantized
        return self._joined(
            [part.dequantized(self._dtype) if isinstance(part, QuantizedWeight) else part for part in parts]
        )

    def _quantized(self, weight: Tensor, scheme: Scheme) -> QuantizedWeight:
        try:
            return round_to_nearest(weight.to(self._device), scheme)
        except ValueError as error:
            raise ModelError(f"--quantization: {error}") from error

    def _joined(self, parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Concatenate parts in new memory; a part may still be in its file."""
        rows = sum(len(part) for part in parts)
        whole = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype or self._dtype, device=self._device)
        begin = 0
        for part in parts:
            whole[begin : begin + len(part)].copy_(part)
            begin += len(part)
        return whole

    def _bias(self, place: LinearPlace) -> Tensor | None:
        if not place.bias:
            return None
        return self._joined(
            [self._source.tensor(f"{module}.bias", (rows,)) for module, rows in place.modules.items()]
        )

    def _norm(self, module: str) -> Tensor:
        norm = self._source.tensor(f"{module}.weight", (self._spec.hidden_size,))
        return self._joined([norm], torch.float32).add_(self._spec.norm_offset)

    def _head_norms(self, index: int) -> Tensor | None:
        """One weight for every head of the queries, another for every head of the keys."""
        if not self._spec.qk_norm:
            return None
        size = self._spec.head_dim
        queries, keys = (self._source.tensor(f"{m}.weight", (size,)) for m in head_norm_modules(index))
        repeated = [queries.expand(self._spec.num_heads, size), keys.expand(self._spec.num_kv_heads, size)]
        return self._joined(repeated, torch.float32).add_(self._spec.norm_offset)


def check_names(checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Raise ModelError unless the checkpoint has exactly the tensors that the model needs."""
    required = {name for name, _ in other_tensors(spec)}
    optional = {f"{HEAD}.weight"} if spec.tied_embeddings else set()
    for module, _ in linear_modules(spec):
        layout = spec.stored.layout_of(module) if spec.stored else None
        required |= {f"{module}.{suffix}" for suffix in (layout.required if layout else ("weight",))}
        optional |= {f"{module}.{suffix}" for suffix in (layout.optional if layout else ())}
    missing = required.difference(checkpoint.names)
    if missing:
        raise ModelError(f"{checkpoint.folder} lacks {listed(missing)}")
    unexpected = [
        name
        for name in set(checkpoint.names) - required - optional
        if not _ignored(name, spec) and not _void_bias(checkpoint, name, spec)
    ]
    if unexpected:
        raise ModelError(
            f"{checkpoint.folder} has tensors that {spec.architecture} does not use: {listed(unexpected)}"
        )


def _ignored(name: str, spec: DecoderSpec) -> bool:
    other_part = spec.nested_checkpoint and name.startswith(_OTHER_PARTS)
    return other_part or name.endswith(_HARMLESS)


def _void_bias(checkpoint: Checkpoint, name: str, spec: DecoderSpec) -> bool:
    """Some writers of quantized checkpoints add a bias of zeros to every linear layer."""
    return spec.stored is not None and name.endswith(".bias") and not checkpoint.read(name).any()


def _plain_name(name: str) -> str:
    """The name of a text model's tensor when the model stands alone; handles older and newer nesting."""
    for nested, plain in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if name.startswith(nested):
            return plain + name.removeprefix(nested)
    return name.removeprefix("language_model.")


def _tensors(part: Weight | None) -> tuple[Tensor, ...]:
    if part is None:
        return ()
    return part.tensors() if isinstance(part, QuantizedWeight) else (part,)


def _kinds(weights: DecoderWeights) -> str:
    """The number of linear layers of each kind: ``28 W4A16 in groups of 128, 1 W8A8``."""
    linears = [w for layer in weights.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    every = [*linears, weights.head]
    if not any(isinstance(weight, QuantizedWeight) for weight in every):
        return ""
    kinds = Counter(
        weight.kind if isinstance(weight, QuantizedWeight) else str(weight.dtype).removeprefix("torch.")
        for weight in every
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def kv_fingerprint(weights: DecoderWeights, spec: DecoderSpec, max_model_len: int) -> str:
    """A fingerprint of all that a token's keys and values depend on, except the tokens.

    It covers the weights, the fields of the config, and the longest context where rotations are stretched for it.
    """
    stretched = any(rope.kind in ("dynamic", "longrope") for rope in spec.ropes)
    described = (weights.fingerprint(), replace(spec, stored=None), max_model_len if stretched else 0)
    return hashlib.sha256(repr(described).encode()).hexdigest()
