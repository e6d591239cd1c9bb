"""The weights of a GGUF file for `model.weights`: tensors by the names of a checkpoint, quantized as they are stored.

What llama.cpp's conversion changes is said in the specification (`as_stored`): heads of Llama-like models rotate pairs
of neighbours, norms contain Gemma's 1, and a model without a head of its own uses its embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch import Tensor

from headrace.compute.checkpoint import ModelError, listed
from headrace.compute.model.gguf.blocks import PLAIN, SUPPORTED, read
from headrace.compute.model.gguf.file import GgufFile, GgufTensor
from headrace.compute.model.layout import (
    EMBEDDING,
    HEAD,
    Weight,
    expert_places,
    head_norms,
    linear_places,
    norm_modules,
    plain_shapes,
    router_tensors,
)
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.quantization.scheme import LinearLayout
from headrace.compute.quantization.weight import QuantizedWeight

_HEAD: Final = "output.weight"
_INTERLEAVED: Final = frozenset(("llama", "granite", "granitemoe", "mistral3", "smollm3"))
"""The architectures whose queries and keys the conversion reorders, so that pairs of neighbours rotate."""
_OF_CONFIG: Final = frozenset(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))
"""Tensors that belong to the specification of the rotary embedding."""
_LINEAR: Final = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
_MERGED: Final = {"qkv": ("attn_qkv",), "gate_up": ("ffn_up",)}
_ROUTER: Final = ("ffn_gate_inp", "ffn_gate_inp_shexp")
_NORMS: Final = {
    "input_norm": "attn_norm",
    "post_attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "post_mlp_norm": "post_ffw_norm",
}


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """The quantization of a file, whose linear layers have one tensor each; ``name`` lists the types of them."""

    name: str

    def layout_of(self, module: str) -> LinearLayout | None:
        return None


def as_stored(file: GgufFile, spec: DecoderSpec) -> DecoderSpec:
    """The specification of a model as its tensors in ``file`` need it."""
    kinds = sorted({tensor.type.name for tensor in file.tensors.values()} - set(PLAIN))
    interleaved = file.metadata.get("general.architecture") in _INTERLEAVED
    return replace(
        spec,
        norm_offset=0.0,
        interleaved_rope=spec.interleaved_rope or interleaved,
        tied_embeddings=_HEAD not in file.tensors,
        merged_qkv="blk.0.attn_qkv.weight" in file.tensors,
        merged_gate_up="blk.0.ffn_gate.weight" not in file.tensors and not spec.layers[0].experts,
        stored=GgufFormat(f"GGUF {', '.join(kinds)}") if kinds else None,
    )


class _Place(NamedTuple):
    """The tensor of a module in a file, without ``.weight``; or expert ``number`` of the ``experts`` in it."""

    stored: str
    number: int = 0
    experts: int = 0


class GgufSource:
    """The weights of a file; ``spec`` as `as_stored` returns it.

    Raises:
        ModelError: tensors are missing, unexpected, of another shape, or of a type that is not supported; the message
            names them.
    """

    def __init__(self, file: GgufFile, spec: DecoderSpec) -> None:
        self._file = file
        self._places = dict(_places(spec))
        wanted = dict(self._wanted(name, shape) for name, shape in plain_shapes(spec).items())
        missing = wanted.keys() - file.tensors.keys()
        if missing:
            raise ModelError(f"{file.path} lacks {listed(missing)}")
        unexpected = file.tensors.keys() - wanted.keys() - _OF_CONFIG
        if unexpected:
            raise ModelError(
                f"{file.path} has tensors that {spec.architecture} does not use: {listed(unexpected)}"
            )
        for name, shape in wanted.items():
            _check(file.tensors[name], shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._read(name)
        return (weight.dequantized() if isinstance(weight, QuantizedWeight) else weight).view(shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        return self._read(f"{module}.weight")

    def embedding(self, shape: tuple[int, int]) -> Weight:
        return self._read(f"{EMBEDDING}.weight")

    def _read(self, name: str) -> Weight:
        module, _, suffix = name.rpartition(".")
        place = self._places[module]
        tensor = self._file.tensors[f"{place.stored}.{suffix}"]
        data = self._file.data(tensor)
        if place.experts:
            rows = len(data) // place.experts
            data = data[place.number * rows : (place.number + 1) * rows]
        return read(tensor.type, data)

    def _wanted(self, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The tensor in the file that has the tensor ``name``, and its shape."""
        module, _, suffix = name.rpartition(".")
        place = self._places[module]
        return f"{place.stored}.{suffix}", (place.experts, *shape) if place.experts else shape


def _places(spec: DecoderSpec) -> Iterator[tuple[str, _Place]]:
    """The modules of a checkpoint, without ``.weight``, and where a file has them."""
    yield EMBEDDING, _Place("token_embd")
    yield spec.names.final_norm, _Place("output_norm")
    yield HEAD, _Place("output")
    merged = {"qkv": spec.merged_qkv, "gate_up": spec.merged_gate_up}
    for index in range(spec.num_layers):
        block = f"blk.{index}."
        for field, place in linear_places(spec, index).items():
            stored: Collection[str] = _MERGED[field] if merged.get(field) else _LINEAR[field]
            for module, name in zip(place.modules, stored, strict=True):
                yield module, _Place(block + name)
        for field, module in norm_modules(spec, index).items():
            yield module, _Place(block + _NORMS[field])
        for module, name in zip(head_norms(spec, index), ("attn_q_norm", "attn_k_norm"), strict=False):
            yield module, _Place(block + name)
        for tensor, name in zip(router_tensors(spec, index), _ROUTER, strict=False):
            yield tensor.removesuffix(".weight"), _Place(block + name)
        yield from _expert_places(spec, index, block)


def _expert_places(spec: DecoderSpec, index: int, block: str) -> Iterator[tuple[str, _Place]]:
    """The experts of a layer: all but the shared one are parts of one tensor for each of their linears."""
    count = 0 if spec.experts is None else spec.experts.routing.experts
    for number, pair in enumerate(expert_places(spec, index)):
        modules = [module for place in pair for module in place.modules]
        for module, name in zip(modules, (*_LINEAR["gate_up"], *_LINEAR["down"]), strict=True):
            if number < count:
                yield module, _Place(f"{block}{name}_exps", number, count)
            else:
                yield module, _Place(f"{block}{name}_shexp")


def _check(tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    flat = shape[1:] if shape[0] == 1 else shape  # some converters leave a single row out
    if tensor.shape not in (shape, flat):
        raise ModelError(
            f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}, the metadata says {list(shape)}"
        )
    if tensor.type.name not in SUPPORTED:
        raise ModelError(
            f"{tensor.path}: {tensor.name} is in {tensor.type.name}, which is not supported; use a file in Q4_K_M,"
            " Q5_K_M, Q6_K or Q8_0"
        )
