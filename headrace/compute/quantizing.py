"""Writes a quantized copy of a plain checkpoint, as compressed-tensors, layer by layer.

The LM head is not quantized, as most readers of the format expect. Embedding, norms and biases are not quantized
either; activation-aware scaling may change them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.checkpoint import INDEX, Checkpoint, LinearPlace, ModelError
from headrace.compute.kernels import Kernels
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.layout import (
    HEAD,
    head_norms,
    linear_places,
    norm_modules,
    plain_shapes,
)
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights, as_stored, check_names, plain_name
from headrace.compute.quantization.layouts import stored_format, stored_parts
from headrace.compute.quantization.scheme import Scheme, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight

# Reads texts with a decoder, one at a time, without an engine: to calibrate a quantized model, and to judge
# it.

_READ_BLOCK = 16


class Reader:
    """Reads texts of up to ``max_tokens`` tokens and returns logits.

    Args:
        spec: the model.
        weights: its weights, whose layers are moved out of it.
        kernels: the backend.
        max_tokens: length of the longest text.
        kv_dtype: dtype of the KV pages; None: that of the weights.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        max_tokens: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._decoder = Decoder(spec, weights, kernels, max_tokens)
        self._blocks = -(-max_tokens // _READ_BLOCK)
        dtype = kv_dtype or self._decoder.dtype
        self._kv = PagedKV(spec.shape, self._blocks, _READ_BLOCK, dtype, self._decoder.device)

    def logits(self, tokens: Sequence[int], wanted: int) -> Tensor:
        """Float32 logits [wanted, vocab] after each of the last ``wanted`` of the tokens."""
        count, device = len(tokens), self._decoder.device
        places = torch.arange(count, device=device)
        batch = Batch(
            tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
            positions=places,
            slot_mapping=places,
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([count], dtype=torch.int32, device=device),
            block_tables=torch.arange(self._blocks, dtype=torch.int32, device=device)[None],
            logits_indices=places[count - wanted :],
            lengths=(count,),
            contexts=(count,),
            decode_rows=int(count == 1),
            block_size=_READ_BLOCK,
        )
        return self._decoder.forward(batch, self._kv)


# Calibration: second moments of the inputs of linear layers, summed while a model reads a text.

LINEARS = ("qkv", "output", "gate_up", "down")
"""The linear layers of a layer, in the order in which a decoder prepares and computes them."""

_MOMENTS_BYTES = 4 << 30
"""Limit of moments in memory at once."""

Moments = dict[tuple[int, str], Tensor]
"""By layer and linear layer: float32 [in, in], the sum over tokens of ``x xᵀ``."""


class _Enough(Exception):
    """All observed layers have run; this is not an error."""


class WatchingKernels(TorchKernels):
    """Kernels that compute as the torch kernels, and sum the moments of the inputs of some ``layers``.

    They stop after the last of these, because the layers after it and the head are not needed.
    """

    name = "watching"

    def __init__(self, layers: Collection[int]) -> None:
        super().__init__()
        self.moments: Moments = {}
        self._layers = layers
        self._last = max(layers), LINEARS[-1]
        self._prepared = 0

    def prepare_linear(self, weight: Tensor | QuantizedWeight, *, consume: bool = False) -> Any:
        layer, which = divmod(self._prepared, len(LINEARS))
        self._prepared += 1
        return (layer, LINEARS[which]), super().prepare_linear(weight)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        place, prepared = weight
        if place[0] in self._layers:
            wide = x.float()
            moments = wide.T @ wide
            self.moments[place] = self.moments[place].add_(moments) if place in self.moments else moments
        if place == self._last:
            raise _Enough
        return super().linear(x, prepared, bias)


def input_moments(
    spec: DecoderSpec, weights: DecoderWeights, windows: Iterable[Sequence[int]], layers: Collection[int]
) -> Moments:
    """The moments of the linear layers of ``layers`` over windows of tokens, each read separately; uses up the
    weights.
    """
    kernels = WatchingKernels(layers)
    every = list(windows)
    reader = Reader(spec, weights, kernels, max(map(len, every)))
    for tokens in every:
        with suppress(_Enough):  # all wanted: the model's last layer computes only wanted positions
            reader.logits(tokens, wanted=len(tokens))
    return {place: moments.cpu() for place, moments in kernels.moments.items()}


def split_windows(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """Split a text into windows of ``length`` tokens; the rest at its end is dropped."""
    return [tokens[begin : begin + length] for begin in range(0, len(tokens) - length + 1, length)]


class Calibration:
    """The moments of every layer on one text, computed for as many layers at a time as fit in memory.

    Args:
        spec: the model.
        load: loads its weights again, for each reading of the text.
        windows: the text, in tokens.
    """

    def __init__(
        self, spec: DecoderSpec, load: Callable[[], DecoderWeights], windows: Sequence[Sequence[int]]
    ) -> None:
        self._spec, self._load, self._windows = spec, load, windows
        widths = [place.inputs for place in linear_places(spec, 0).values()]
        self._at_once = max(1, _MOMENTS_BYTES // sum(4 * width * width for width in widths))
        self._held: Moments = {}

    def of(self, layer: int) -> dict[str, Tensor]:
        """The moments of a layer's linear layers; layers should be requested in order."""
        if (layer, LINEARS[0]) not in self._held:
            wanted = range(layer, min(layer + self._at_once, self._spec.num_layers))
            self._held = {}  # freed before the next are computed
            self._held = input_moments(self._spec, self._load(), self._windows, wanted)
        return {linear: self._held[layer, linear] for linear in LINEARS}


# Quality of a quantized model: compared with the plain model on a text.
#
# Perplexity measures the loss in predicting the text. Divergence measures the distance of the two distributions,
# whatever token comes next. Agreement measures how often greedy decoding would choose the same token.

MOST_PERPLEXITY = 0.05
"""Bound: the perplexity may grow by this share."""
MOST_DIVERGENCE = 0.1
"""Bound: the mean divergence, in nats a token."""


class Quality(NamedTuple):
    """The quality of one model relative to another, over the same tokens.

    ``divergence`` is the mean of KL(plain ‖ other) in nats. ``agreement`` is the share of tokens at which both have
    the same likeliest token.
    """

    plain_perplexity: float
    perplexity: float
    divergence: float
    agreement: float
    tokens: int

    @property
    def growth(self) -> float:
        """Growth of the perplexity, as a share of the plain model's."""
        return self.perplexity / self.plain_perplexity - 1

    def faults(self) -> list[str]:
        """The bounds that it exceeds."""
        found = []
        if not self.growth <= MOST_PERPLEXITY:
            found.append(f"perplexity grew by {self.growth:.1%}, more than {MOST_PERPLEXITY:.0%}")
        if not self.divergence <= MOST_DIVERGENCE:
            found.append(f"divergence is {self.divergence:.3f} nats a token, more than {MOST_DIVERGENCE}")
        return found


def compare(plain: Reader, other: Reader, windows: Iterable[Sequence[int]]) -> Quality:
    """Let both models read every window separately, and compare them."""
    loss = other_loss = divergence = 0.0
    agreed = count = 0
    for tokens in windows:
        truth = torch.tensor(tokens[1:])
        a, b = (each.logits(tokens, len(tokens)).cpu()[:-1].log_softmax(-1) for each in (plain, other))
        loss += float(F.nll_loss(a, truth, reduction="sum"))
        other_loss += float(F.nll_loss(b, truth, reduction="sum"))
        divergence += float(F.kl_div(b, a, log_target=True, reduction="sum"))
        agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
        count += len(truth)
    return Quality(
        math.exp(loss / count), math.exp(other_loss / count), divergence / count, agreed / count, count
    )


# Better values than the nearest ones, by the inputs that linear layers see: GPTQ and AWQ.
#
# GPTQ (arXiv:2210.17323): inputs that are rounded later compensate the rounding error of each input.
#
# The second moments of the inputs, which `input_moments` computes from a text, say how: of two correlated
# inputs, one can compensate the error of the other.

_DAMPING = 0.01
"""Added to the moments' diagonal, as a share of its mean, because a short text leaves directions without any input."""
_BLOCK = 128
"""Number of inputs after which all later ones receive the errors at once: one large product instead of many small
ones."""


def gptq(weight: Tensor, moments: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> QuantizedWeight:
    """Quantize a weight [out, in] to the grid of ``scheme``, given the ``moments`` [in, in] of its inputs, all
    float32.
    """
    outputs, inputs = weight.shape
    group = scheme.group(inputs)
    remaining = weight.clone()
    remaining[:, moments.diagonal() == 0] = 0  # an input that is always 0 needs no weight
    factors = _inverse_factors(moments)
    integers = torch.empty_like(weight)
    scales = torch.empty(outputs, inputs // group)
    zeros = torch.empty_like(scales)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        errors = torch.empty(outputs, end - begin)
        for column in range(begin, end):
            which, within = divmod(column, group)
            chosen = slice(which, which + 1)
            if within == 0:  # use the weights as corrected so far
                members = _settled(remaining, errors, factors, begin, column, end, column + group)
                scales[:, chosen], zeros[:, chosen] = scheme.grid(members, scale_dtype)
            values = remaining[:, column : column + 1]
            rounded = scheme.round(values, scales[:, chosen], zeros[:, chosen])
            integers[:, column : column + 1] = rounded
            error = (values - (rounded - zeros[:, chosen]) * scales[:, chosen]) / factors[column, column]
            remaining[:, column + 1 : end] -= error * factors[column, column + 1 : end]
            errors[:, column - begin : column - begin + 1] = error
        remaining[:, end:] -= errors @ factors[begin:end, end:]
    return scheme.pack(integers, scales, zeros, None)


def _settled(
    remaining: Tensor, errors: Tensor, factors: Tensor, begin: int, column: int, end: int, last: int
) -> Tensor:
    """The weights from ``column`` to ``last``; those beyond this block get its errors so far."""
    members = remaining[:, column:last].clone()
    if last > end and column > begin:
        members[:, end - column :] -= errors[:, : column - begin] @ factors[begin:column, end:last]
    return members


def _inverse_factors(moments: Tensor) -> Tensor:
    """The upper triangular factor of the inverse moments: row ``i`` says how later inputs compensate input ``i``."""
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factors: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factors


# AWQ, activation-aware scaling (arXiv:2306.00978): large inputs get finer weights.
#
# The weights of an input are multiplied by a factor, and the producer of the input is divided by it. The model stays
# the same, but its quantization grid changes. The exponent of the input sizes is chosen by search: it minimizes the
# error of the outputs.

_TRIED = 20
"""Exponents between 0 (all factors 1) and 1 (as large as the inputs)."""


def best_factors(weight: Tensor, moments: Tensor, scheme: Scheme) -> Tensor:
    """Factors [in] for the inputs of a weight [out, in], given the moments [in, in] of its inputs.

    The error is that of the outputs over the calibration text, squared and summed. With the weight's error E and
    moments M it is the trace of E M Eᵀ.
    """
    size = moments.diagonal().sqrt().clamp(min=1e-4)
    found, least = torch.ones_like(size), float("inf")
    for step in range(_TRIED):
        factors = size ** (step / _TRIED)
        factors /= (factors.max() * factors.min()).sqrt()
        error = round_to_nearest(weight * factors, scheme).dequantized() / factors - weight
        loss = float((error @ moments).mul_(error).sum())
        if loss < least:
            found, least = factors, loss
    return found


Method = Literal["rtn", "gptq", "awq"]

_SHARD_BYTES = 4 << 30
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")


@dataclass(slots=True)
class _Layer:
    """The tensors of a layer in float32, by the fields of `weights.LayerWeights`; parts that become one are stacked."""

    places: Mapping[str, LinearPlace]
    linears: dict[str, Tensor]
    biases: dict[str, Tensor]
    norms: dict[str, Tensor]


def write_quantized(
    source: Path,
    target: Path,
    config: Mapping[str, Any],
    spec: DecoderSpec,
    scheme: Scheme,
    method: Method,
    calibration: Calibration,
) -> None:
    """Write the model in ``source`` to the new folder ``target``; the method "rtn" needs no moments.

    Raises:
        ModelError: its weights are quantized already, belong to a larger model, do not match ``spec``, do not fit
            ``scheme``, or are not finite.
        OSError: the folder cannot be written.
    """
    _check_kind(source, spec)
    groups: dict[int, set[str]] = defaultdict(set)
    with Checkpoint(source, plain_name) as checkpoint:
        spec = as_stored(checkpoint, spec)
        check_names(checkpoint, spec)
        _check_widths(source, spec, scheme)
        target.mkdir(parents=True)
        shards = _Shards(target)
        stored = checkpoint.read(f"{spec.names.final_norm}.weight").dtype
        scale_dtype = torch.bfloat16 if stored == torch.bfloat16 else torch.float32
        for index in range(spec.num_layers):
            layer = _read(checkpoint, spec, index)
            moments = {} if method == "rtn" else calibration.of(index)
            _check_numbers(source, layer, moments)
            if method == "awq":
                _scale(layer, moments, scheme, spec.norm_offset)
            for name, place in layer.places.items():
                weight = layer.linears[name]
                if method == "gptq":
                    quantized = gptq(weight, moments[name], scheme, scale_dtype)
                else:
                    quantized = round_to_nearest(weight, scheme, scale_dtype)
                groups[quantized.group_size].update(module.rpartition(".")[2] for module in place.modules)
                for module, begin, end in _outputs(place):
                    parts = stored_parts(quantized.rows(begin, end), scale_dtype)
                    shards.add({f"{module}.{suffix}": part for suffix, part in parts.items()})
            shards.add({name: tensor.to(stored) for name, tensor in _others(layer, spec, index).items()})
            del moments  # free them before those of the next layer are computed
        outside = [name for name in plain_shapes(spec) if not name.startswith("model.layers.")]
        shards.add({name: checkpoint.read(name).clone() for name in outside})
    shards.close()
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in (INDEX, "config.json"):
                shutil.copyfile(file, target / file.name)
    written = {
        **config,
        "tie_word_embeddings": spec.tied_embeddings,
        "quantization_config": _config(scheme, groups),
    }
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _check_kind(source: Path, spec: DecoderSpec) -> None:
    if spec.stored or spec.nested_checkpoint:
        raise ModelError(f"{source}: only text models with plain weights can be quantized")
    if spec.mixer:
        raise ModelError(
            f"{source}: models with recurrent states cannot be written; --quantization rounds them at start"
        )
    if not spec.alike or spec.layer_scales:
        raise ModelError(
            f"{source}: models whose layers differ in heads, have numbers or inputs of their own, or keep latents"
            " cannot be written; --quantization rounds them at start"
        )
    if spec.experts:
        raise ModelError(
            f"{source}: mixtures of experts cannot be written; --quantization rounds them at start"
        )


def _check_widths(source: Path, spec: DecoderSpec, scheme: Scheme) -> None:
    try:
        for place in linear_places(spec, 0).values():
            scheme.group(place.inputs)
    except ValueError as error:
        raise ModelError(f"{source}: {error}") from error


def _check_numbers(source: Path, layer: _Layer, moments: Mapping[str, Tensor]) -> None:
    for name, place in layer.places.items():
        for kind, tensors in (("weights", layer.linears), ("inputs", moments)):
            if name in tensors and not tensors[name].isfinite().all():
                raise ModelError(f"{source}: {kind} of {', '.join(place.modules)} are not finite")


def _read(checkpoint: Checkpoint, spec: DecoderSpec, index: int) -> _Layer:
    places = linear_places(spec, index)

    def stacked(place: LinearPlace, kind: str) -> Tensor:
        return torch.cat([checkpoint.read(f"{module}.{kind}").float() for module in place.modules])

    return _Layer(
        places,
        {name: stacked(place, "weight") for name, place in places.items()},
        {name: stacked(place, "bias") for name, place in places.items() if place.bias},
        {
            name: checkpoint.read(f"{module}.weight").float()
            for name, module in norm_modules(spec, index).items()
        }
        | {name: checkpoint.read(f"{name}.weight").float() for name in head_norms(spec, index)},
    )


def _scale(layer: _Layer, moments: dict[str, Tensor], scheme: Scheme, norm_offset: float) -> None:
    """Scale the inputs' weights, and divide their producers: norms, and for ``down`` the outputs of ``up``.

    The inputs of ``output`` are values that several heads share, so they are not scaled.
    """
    factors = best_factors(layer.linears["down"], moments["down"], scheme)
    layer.linears["down"] *= factors
    layer.linears["gate_up"][len(factors) :] /= factors[:, None]
    if "gate_up" in layer.biases:
        layer.biases["gate_up"][len(factors) :] /= factors
    for norm, linear in (("input_norm", "qkv"), ("mlp_norm", "gate_up")):
        if norm not in layer.norms:  # its inputs are the residual, which others read too
            continue
        factors = best_factors(layer.linears[linear], moments[linear], scheme)
        layer.linears[linear] *= factors
        layer.norms[norm] = (layer.norms[norm] + norm_offset) / factors - norm_offset


def _outputs(place: LinearPlace) -> Iterator[tuple[str, int, int]]:
    """The modules of a place, with the range of outputs of each."""
    begin = 0
    for module, outputs in place.modules.items():
        yield module, begin, begin + outputs
        begin += outputs


def _others(layer: _Layer, spec: DecoderSpec, index: int) -> dict[str, Tensor]:
    """Norms and biases by their names in a checkpoint."""
    modules = norm_modules(spec, index)
    tensors = {f"{modules.get(name, name)}.weight": norm for name, norm in layer.norms.items()}
    for name, bias in layer.biases.items():
        parts = _outputs(layer.places[name])
        tensors |= {f"{module}.bias": bias[begin:end].clone() for module, begin, end in parts}
    return tensors


class _Shards:
    """Collects tensors and writes them to files of limited size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._places: dict[str, str] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self._waiting |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= _SHARD_BYTES:
            self._write()

    def close(self) -> None:
        """Write the remaining tensors, and the index."""
        self._write()
        index = {"metadata": {}, "weight_map": self._places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        name = f"model-{len(set(self._places.values())) + 1:05}.safetensors"
        file = self._folder / name
        file.touch()
        mode = file.stat().st_mode
        try:
            save_file(self._waiting, file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{file}: {error}") from error
        file.chmod(mode)  # the library makes the file private: give it the usual mode
        self._places |= dict.fromkeys(self._waiting, name)
        self._waiting = {}


def _config(scheme: Scheme, groups: Mapping[int, set[str]]) -> dict[str, Any]:
    """The ``quantization_config``: one group, or one per group size if the widths need different ones."""
    whole = scheme.group_size is None
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}

    def group(size: int, targets: list[str]) -> dict[str, Any]:
        weights = {
            "num_bits": scheme.bits,
            "type": "int",
            "strategy": "channel" if whole else "group",
            "group_size": None if whole else size,
            "symmetric": scheme.symmetric,
            "dynamic": False,
        }
        acting = activations if scheme.activation_bits == 8 else None
        return {"targets": targets, "weights": weights, "input_activations": acting}

    if whole or len(groups) == 1:
        found = [group(next(iter(groups)), ["Linear"])]
    else:
        found = [
            group(size, [f"re:.*\\.{name}$" for name in sorted(names)])
            for size, names in sorted(groups.items())
        ]
    return {
        "quant_method": "compressed-tensors",
        "format": stored_format(scheme.bits, scheme.activation_bits),
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": each for index, each in enumerate(found)},
        "ignore": [HEAD],
    }
