"""The weights of a GGUF file for `model.weights`: tensors by the names of a checkpoint, quantized as they are stored.

What llama.cpp's conversion changes is said in the specification (`as_stored`): heads of Llama-like models rotate pairs
of neighbours, norms contain Gemma's 1, and a model without a head of its own uses its embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headrace.compute.checkpoint import ModelError, listed
from headrace.compute.model.gguf.file import Bytes, GgufFile, GgufTensor, TensorType
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
from headrace.compute.quantization.weight import QuantizedWeight, stacked

# The blocks of GGUF's tensor types as `QuantizedWeight`, value for value: nothing is rounded.
#
# A block is some consecutive inputs of an output, with their scales:
#
# | type | bits | block | group | base |
# |---|---|---|---|---|
# | Q8_0 | 8 | 32 | 32 | zero in the middle |
# | Q4_0 | 4 | 32 | 32 | zero in the middle |
# | Q5_0 | 5, stored here in 8 | 32 | 32 | zero in the middle |
# | Q4_1 | 4 | 32 | 32 | minimum |
# | Q5_1 | 5, stored here in 8 | 32 | 32 | minimum |
# | Q2_K | 2, stored here in 4 | 256 | 16 | minimum |
# | Q3_K | 3, stored here in 4 | 256 | 16 | zero in the middle |
# | Q4_K | 4 | 256 | 32 | minimum |
# | Q5_K | 5, stored here in 8 | 256 | 32 | minimum |
# | Q6_K | 6, stored here in 8 | 256 | 16 | zero in the middle |
#
# Scales and minima of the K types are products of a float of the block and a small integer of the group,
# which are exact in float32. The layouts are those of ``ggml-common.h`` and of the package ``gguf``, which
# tests compare with.

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]

_ELEMENTS_AT_ONCE = 1 << 24


class _Groups(NamedTuple):
    """Blocks [N, size] as integers [N, block], scales and minima [N, groups].

    Integers of 8 bits are those of `QuantizedWeight`, int8; those of 4 bits are counted from the lowest, uint8.
    """

    integers: Array
    scales: Array
    minima: Array | None = None


def _number(blocks: Array, at: int) -> Array:
    """A float16 of each block, as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _halves(nibbles: Array, width: int) -> Array:
    """Lower halves of ``width`` bytes, then their upper halves, and so on: [N, bytes] to [N, 2 * bytes]."""
    grouped = nibbles.reshape(len(nibbles), -1, 1, width)
    return np.concatenate([grouped & 15, grouped >> 4], 2).reshape(len(nibbles), -1)


def _fifth_bits(words: Array) -> Array:
    """The bits of a word of 32, each counting 16: [N, 4] to [N, 32]."""
    return np.unpackbits(np.ascontiguousarray(words), axis=1, bitorder="little") << 4


def _q8_0(blocks: Array) -> _Groups:
    return _Groups(blocks[:, 2:].view(np.int8), _number(blocks, 0))


def _q4_0(blocks: Array) -> _Groups:
    return _Groups(_halves(blocks[:, 2:], 16), _number(blocks, 0))


def _q4_1(blocks: Array) -> _Groups:
    return _Groups(_halves(blocks[:, 4:], 16), _number(blocks, 0), _number(blocks, 2))


def _q5_0(blocks: Array) -> _Groups:
    values = _halves(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return _Groups(values.astype(np.int8) - 16, _number(blocks, 0))


def _q5_1(blocks: Array) -> _Groups:
    values = _halves(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _Groups(_from_lowest(values), _number(blocks, 0), _number(blocks, 2))


def _q2_k(blocks: Array) -> _Groups:
    packed, quarters = blocks[:, :16], blocks[:, 16:80]
    values = _pieces(quarters, 32, (0, 2, 4, 6)) & 3
    minima = -(_number(blocks, 82) * (packed >> 4))
    return _Groups(values, _number(blocks, 80) * (packed & 15), minima)


def _q3_k(blocks: Array) -> _Groups:
    high, quarters = blocks[:, :32], blocks[:, 32:96]
    low, upper = blocks[:, 96:104], blocks[:, 104:108]
    scales = np.concatenate([low & 15, low >> 4], 1) | (_pieces(upper, 4, (0, 2, 4, 6)) & 3) << 4
    values = (_pieces(quarters, 32, (0, 2, 4, 6)) & 3) | (_pieces(high, 32, range(8)) & 1) << 2
    return _Groups(values + 4, _number(blocks, 108) * (scales.astype(np.int8) - 32))


def _q4_k(blocks: Array) -> _Groups:
    return _Groups(_halves(blocks[:, 16:], 32), *_scales_and_minima(blocks))


def _q5_k(blocks: Array) -> _Groups:
    values = _halves(blocks[:, 48:], 32) | (_pieces(blocks[:, 16:48], 32, range(8)) & 1) << 4
    return _Groups(_from_lowest(values), *_scales_and_minima(blocks))


def _q6_k(blocks: Array) -> _Groups:
    values = _halves(blocks[:, :128], 64) | (_pieces(blocks[:, 128:192], 32, (0, 2, 4, 6)) & 3) << 4
    scales = _number(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _Groups(values.astype(np.int8) - 32, scales)


def _pieces(packed: Array, width: int, shifts: range | tuple[int, ...]) -> Array:
    """``width`` bytes shifted by each of ``shifts``, then the next bytes: [N, bytes] to [N, bytes * shifts]."""
    grouped = packed.reshape(len(packed), -1, 1, width)
    return (grouped >> np.array(shifts, np.uint8).reshape(1, 1, -1, 1)).reshape(len(packed), -1)


def _from_lowest(values: Array) -> Array:
    """Integers from 0 on, as int8 from -128 on."""
    return (values ^ 128).view(np.int8)


def _scales_and_minima(blocks: Array) -> tuple[Array, Array]:
    """Scales and minima [N, 8] of Q4_K and Q5_K, whose factors of 6 bits are packed in 12 bytes."""
    first, second, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 2 & 48)], 1)
    minima = np.concatenate([second & 63, rest >> 4 | (second >> 2 & 48)], 1)
    return _number(blocks, 0) * scales, -(_number(blocks, 2) * minima)


_QUANTIZED: Final[Mapping[str, tuple[Literal[4, 8], Callable[[Array], _Groups]]]] = {
    "Q8_0": (8, _q8_0),
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (8, _q5_0),
    "Q5_1": (8, _q5_1),
    "Q2_K": (4, _q2_k),
    "Q3_K": (4, _q3_k),
    "Q4_K": (4, _q4_k),
    "Q5_K": (8, _q5_k),
    "Q6_K": (8, _q6_k),
}
PLAIN: Final[Mapping[str, torch.dtype]] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The types that are not quantized."""

SUPPORTED: Final = (*PLAIN, *_QUANTIZED)
"""The names of the types that can be read."""


def read(kind: TensorType, data: Bytes) -> Tensor | QuantizedWeight:
    """The rows of a tensor from its bytes uint8 [rows, bytes of a row]: plain, or quantized as it is stored."""
    if kind.name in PLAIN:
        return torch.from_numpy(data.copy()).view(PLAIN[kind.name])
    step = max(1, _ELEMENTS_AT_ONCE * kind.size // kind.block // data.shape[1])
    parts = [_quantized(kind, data[begin : begin + step]) for begin in range(0, len(data), step)]
    return stacked(parts) if len(parts) > 1 else parts[0]


def _quantized(kind: TensorType, data: Bytes) -> QuantizedWeight:
    bits, unpack = _QUANTIZED[kind.name]
    rows = len(data)
    integers, scales, minima = unpack(data.reshape(-1, kind.size))
    if bits == 4:
        integers = integers[:, ::2] | integers[:, 1::2] << 4
    return QuantizedWeight(
        torch.from_numpy(np.ascontiguousarray(integers)).view(rows, -1),
        _of_rows(scales, rows),
        None,
        None,
        bits,
        16,
        None if minima is None else _of_rows(minima, rows),
    )


def _of_rows(of_groups: Array, rows: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(of_groups, np.float32)).view(rows, -1)


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
