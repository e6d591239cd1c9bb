"""The weights of a decoder: assembled layer by layer, from a checkpoint or at random, and quantized if requested.

The tensors of a checkpoint are read when they are needed, and a linear layer is quantized before the next one is
read. So the memory peak of loading is close to the size of the model as it will run.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from headrace.compute.checkpoint import Checkpoint, LinearPlace, ModelError, has_weights, listed
from headrace.compute.kernels.mixers import Mixer, tensors_of
from headrace.compute.model.families import parse_config
from headrace.compute.model.gguf import source as gguf
from headrace.compute.model.gguf.config import config_of
from headrace.compute.model.gguf.file import GgufFile, is_gguf
from headrace.compute.model.gguf.source import GgufSource
from headrace.compute.model.hub import read_config
from headrace.compute.model.layout import (
    EMBEDDING,
    HEAD,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    PER_LAYER_TABLE,
    RandomSource,
    Source,
    StoredSource,
    Weight,
    head_norms,
    latent_norms,
    latent_places,
    layer_scale,
    linear_modules,
    mixer_tensors,
    norm_modules,
    other_tensors,
    per_layer_places,
    router_tensors,
    sink_tensors,
)
from headrace.compute.model.sharding import TENSOR, Cut, Range, Shard, shard_of, whole_cut
from headrace.compute.model.spec import DecoderSpec, ExpertsSpec, Norms
from headrace.compute.quantization import scheme as quantization
from headrace.compute.quantization.scheme import SCHEMES, Scheme, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight, stacked

logger = logging.getLogger(__name__)

W = TypeVar("W", Tensor, QuantizedWeight, Weight)

_SAMPLED = 1024
_COMPARED = 1024
_TURNING = ("q_proj", "k_proj", "q_norm", "k_norm", "q_b_proj", "kv_a_proj_with_mqa")
"""The modules whose outputs, or inputs, are heads that rotate."""
_HARMLESS = ("rotary_emb.inv_freq",)
_OTHER_PARTS = tuple(
    f"{prefix}{part}"
    for prefix in ("", "model.")
    for part in (
        "vision_tower.",
        "vision_model.",
        "vision_encoder.",
        "vision_projection.",
        "vision_projector.",
        "visual.",
        "visual_embeddings_table.",
        "image_tower.",
        "image_newline",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "video_tower.",
        "high_res_vision_model.",
        "high_res_vision_neck.",
        "high_res_vision_proj.",
        "high_res_vision_alpha",
        "multi_modal_projector.",
        "mlp_AR.",
        "connector.",
        "aligner.",
        "projector.",
    )
)
"""The tensors that belong to images in a model with a text part."""
_DRAFTS = ("mtp.", "model.mtp.")
"""The layers that only draft, in checkpoints of hybrid models."""
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("text_model.", "model."),
    ("language_model.", ""),
    ("backbone.", "model."),
    ("layers.", "model.layers."),
    ("embed_tokens.", "model.embed_tokens."),
    ("norm.", "model.norm."),
)


class ExpertWeights(NamedTuple):
    """The weights of an expert, and their biases."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Linear weights are [out, in]; norm weights are float32 with the family's offset
    added.

    ``qkv`` stacks queries, keys, values; ``gate_up`` gate, up. ``qk_norm`` is [heads + kv_heads, head_dim]. A layer
    with ``experts``, each with its ``gate_up`` and ``down``, has none of its own; ``router`` [outputs, hidden],
    ``correction`` and ``router_bias`` are those of `kernels.experts.Router`. ``sinks`` float32 [heads] are those of
    attention. ``input_gate``, ``input_projection`` and ``input_state_norm`` add an input of the layer
    (`kernels.per_layer`). The result of the layer is multiplied by ``scale`` [1], which the last norm already contains.
    ``query``, ``query_norm``, ``latent_norm`` and ``expansion`` are those of attention over latents: the expansion [H,
    plain + value, rank] is never quantized.

    In a recurrent layer ``qkv`` is the linear layer whose outputs the ``mixer`` reads first, and ``gates`` the other
    one, if it has two. ``gates`` are also those of attention. ``mixer_first`` and ``mixer_output`` are the linear
    layers of a mixer beside attention. A layer may lack an MLP.
    """

    input_norm: Tensor | None
    qkv: Weight
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Weight
    output_bias: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Weight | None
    gate_up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None
    router: Tensor | None = None
    correction: Tensor | None = None
    gates: Weight | None = None
    gates_bias: Tensor | None = None
    mixer: Mixer | None = None
    mixer_first: Weight | None = None
    mixer_first_bias: Tensor | None = None
    mixer_output: Weight | None = None
    mixer_output_bias: Tensor | None = None
    router_bias: Tensor | None = None
    experts: list[ExpertWeights] | None = None
    sinks: Tensor | None = None
    input_gate: Weight | None = None
    input_projection: Weight | None = None
    input_state_norm: Tensor | None = None
    scale: Tensor | None = None
    query: Weight | None = None
    query_norm: Tensor | None = None
    latent_norm: Tensor | None = None
    expansion: Tensor | None = None


class PerLayerWeights(NamedTuple):
    """The weights of all layers' inputs: ``table`` [vocab, layers * width], ``projection`` [layers * width, hidden] and
    ``norm`` [width].
    """

    table: Tensor
    projection: Weight
    norm: Tensor


@dataclass(slots=True)
class DecoderWeights:
    """All weights; ``head`` is ``embedding`` itself if the model ties them and the head is not quantized.

    ``dtype`` is that of activations. Tables of which rows are looked up, so a tied head too, may be in bfloat16 for
    float32.

    Those of a shard have the embedding and head of its tokens. A stage without one of them has an empty tensor [0,
    hidden] in its place, and the ``norm`` of a stage that is not the last is the next layer's first, if it has one.

    The decoder moves the layers out one by one as it prepares them, so that no weight is in memory twice. ``nbytes``
    remains the size of all of them when they were created. ``quantization`` is the number of linear layers of each
    kind (empty: none is quantized).
    """

    dtype: torch.dtype
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor | None
    head: Weight
    per_layer: PerLayerWeights | None = None
    nbytes: int = field(init=False)
    quantization: str = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors())
        self.quantization = _kinds(self)

    def fingerprint(self) -> str:
        """A digest of every tensor's shape and of elements spread over it, which differs for other weights."""
        return digest(self.quantization, self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once; for a quantized weight, its parts."""
        yield self.embedding
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                part = getattr(layer, name)
                if name == "mixer":
                    yield from () if part is None else tensors_of(part)
                    continue
                for each in itertools.chain(*part) if isinstance(part, list) else (part,):
                    yield from _tensors(each)
        yield from _tensors(self.norm)
        for part in self.per_layer or ():
            yield from _tensors(part)
        if self.head is not self.embedding:
            yield from _tensors(self.head)


def load_weights(
    folder: Path,
    spec: DecoderSpec | Shard,
    dtype: torch.dtype,
    device: torch.device | str,
    quantize: str | None = None,
    *,
    fp8: bool = False,
    head: bool = True,
) -> DecoderWeights:
    """Read a checkpoint's safetensors, or a GGUF file, convert the weights to ``dtype``, and quantize them if
    ``quantize`` names a scheme.

    Of a shard only its part is read. ``fp8`` says whether linear layers stored in fp8 stay so, or are expanded.
    Without ``head``, the LM head is not read, and the embedding stands in its place: for models whose logits are not
    computed.

    Raises:
        ModelError: there are no safetensors, a file is broken, or tensors are missing, unexpected or of another shape
            (the message names them). Or its linear layers are quantized already, and ``quantize`` is set.
    """
    shard = spec if isinstance(spec, Shard) else shard_of(spec)
    if is_gguf(folder):
        file = GgufFile.open(folder)
        whole = gguf.as_stored(file, shard.whole)
        if quantize and whole.stored:
            raise ModelError(
                f"--quantization {quantize}: {folder} is already quantized ({whole.stored.name}); omit this option"
            )
        source = GgufSource(file, whole)
        return _Assembly(replace(shard, whole=whole), source, dtype, device, quantize).weights()
    with Checkpoint(folder, names_for(shard.whole)) as checkpoint:
        whole = as_stored(checkpoint, shard.whole)
        split_experts(checkpoint, whole)
        if not head:
            checkpoint.drop(f"{HEAD}.")
            whole = replace(whole, tied_embeddings=True)
        shard = replace(shard, whole=whole)
        check_names(checkpoint, whole)
        stored = StoredSource(checkpoint, whole, fp8=fp8 and quantize is None)
        return _Assembly(shard, stored, dtype, device, quantize).weights()


def read_spec(folder: Path) -> DecoderSpec:
    """The specification of the model in a folder: what its config says, except that a head which differs from the
    embedding is not tied to it. Or that of the model in a GGUF file, whose tensors say more (`gguf.source.as_stored`).

    Without weights in the folder, the config alone decides.

    Raises:
        ModelError: the config is not supported, or a file is broken.
    """
    if is_gguf(folder):
        file = GgufFile.open(folder)
        return gguf.as_stored(file, parse_config(config_of(file)))
    spec = parse_config(read_config(folder))
    if not spec.tied_embeddings or not has_weights(folder):
        return spec
    with Checkpoint(folder, names_for(spec)) as checkpoint:
        return as_stored(checkpoint, spec)


def as_stored(checkpoint: Checkpoint, spec: DecoderSpec) -> DecoderSpec:
    """The specification with a head of its own if the config ties it to the embedding and the checkpoint has another.

    If the checkpoint has only the head of a tied pair, that is the embedding too.
    """
    embedding, head = f"{EMBEDDING}.weight", f"{HEAD}.weight"
    stored = {name for name in checkpoint.names if name.startswith(f"{HEAD}.")}
    if not spec.tied_embeddings or not stored:
        return spec
    if stored == {head}:
        if embedding not in checkpoint.names:
            checkpoint.add_name(embedding, head)
            return spec
        table = checkpoint.read(embedding, (spec.vocab_size, spec.hidden_size))
        if _equal(table, checkpoint.read(head)):
            return spec
    return replace(spec, tied_embeddings=False)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tables hold the same values, whatever their dtypes; read in parts until the first difference."""
    if one.shape != other.shape:
        return False
    ranges = ((begin, begin + _COMPARED) for begin in range(0, len(one), _COMPARED))
    return all(torch.equal(one[begin:end].double(), other[begin:end].double()) for begin, end in ranges)


def dummy_weights(
    spec: DecoderSpec | Shard,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    quantize: str | None = None,
) -> DecoderWeights:
    """Random weights of the model's shape, the same for the same seed and kind of device; for benchmarks."""
    shard = spec if isinstance(spec, Shard) else shard_of(spec)
    return _Assembly(shard, RandomSource(shard.whole, dtype, device, seed), dtype, device, quantize).weights()


class _Assembly:
    """Assembles the weights of a shard: cuts and merges modules, converts dtypes, quantizes linear layers."""

    def __init__(
        self,
        shard: Shard,
        source: Source,
        dtype: torch.dtype,
        device: torch.device | str,
        quantize: str | None,
    ) -> None:
        self._shard, self._spec = shard, shard.whole
        self._source, self._dtype, self._device = source, dtype, device
        self._scheme = SCHEMES[quantize] if quantize else None
        self._expands = False

    def weights(self) -> DecoderWeights:
        # The tables are the largest tensors, and in memory twice while they are copied, so they come before the layers.
        embedding, head = self._tables()
        inputs = self._per_layer() if self._shard.place.last else None
        layers = [self._layer(index) for index in range(*self._shard.layers)]
        if not self._shard.place.last:
            following = norm_modules(self._spec, self._shard.layers.end).get("input_norm")
            norm = None if following is None else self._norm(following)
            return DecoderWeights(self._dtype, embedding, layers, norm, head)
        norm = self._norm(self._spec.names.final_norm)
        return DecoderWeights(self._dtype, embedding, layers, norm, head, inputs)

    def _tables(self) -> tuple[Tensor, Weight]:
        """The embedding and the head of this shard; empty ones where it has none."""
        place, tied = self._shard.place, self._spec.tied_embeddings
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        needed = place.first or (place.last and tied)
        table = self._source.embedding(shape) if needed else None
        embedding = self._nothing() if table is None else self._embedding(table)
        codes = table if isinstance(table, QuantizedWeight) else None
        del table  # what the embedding was copied from is freed before the head is read
        if not place.last:
            return embedding, self._nothing()
        if not tied or codes is not None:
            stored = codes if tied and codes is not None else self._source.linear(HEAD, shape)
            cut = Cut(((self._shard.vocabulary,),), Range(0, shape[1]))
            return embedding, self._whole([(HEAD, stored)], quantization.HEAD, cut)
        if self._scheme:
            return embedding, self._quantized(embedding, quantization.HEAD)
        return embedding, embedding

    def _per_layer(self) -> PerLayerWeights | None:
        """The weights of the layers' inputs. Rows of their table are looked up, so it is never quantized here."""
        of = self._spec.per_layer
        if of is None:
            return None
        features, hidden = self._spec.per_layer_features, self._spec.hidden_size
        place = LinearPlace({PER_LAYER_PROJECTION: features}, hidden, False)
        return PerLayerWeights(
            self._table(self._source.tensor(f"{PER_LAYER_TABLE}.weight", (of.vocab_size, features))),
            self._linear(place, whole_cut(place)),
            self._norm(PER_LAYER_NORM, of.width),
        )

    def _embedding(self, table: Weight) -> Tensor:
        """The embeddings of this shard's tokens. Their rows are looked up, so a quantized table is expanded."""
        tokens = self._shard.vocabulary
        if isinstance(table, QuantizedWeight):
            return table.rows(tokens.begin, tokens.end).dequantized(self._dtype).to(self._device)
        return self._table(table[tokens.begin : tokens.end])

    def _table(self, stored: Tensor) -> Tensor:
        """A table whose rows are looked up: it stays in bfloat16 where rows are computed in float32, as in its file."""
        narrow = self._dtype == torch.float32 and stored.dtype == torch.bfloat16
        return self._joined([stored], stored.dtype if narrow else None)

    def _nothing(self) -> Tensor:
        return torch.empty((0, self._spec.hidden_size), dtype=self._dtype, device=self._device)

    def _layer(self, index: int) -> LayerWeights:
        cuts = list(self._shard.cuts(index))
        linears: dict[str, Weight | None] = dict.fromkeys(("gate_up", "down"))
        recurrent = self._spec.layers[index].recurrent
        linears |= {
            name: self._plain(place, cut) if recurrent and name == "gates" else self._linear(place, cut)
            for name, place, cut in cuts
        }
        biases: dict[str, Tensor | None] = dict.fromkeys(("gate_up_bias", "down_bias"))
        biases |= {f"{name}_bias": self._bias(place, cut) for name, place, cut in cuts}
        own = per_layer_places(self._spec, index) | latent_places(self._spec, index)
        expansion = self._expansion(own.pop("expansion", None))
        linears |= {name: self._linear(place, whole_cut(place)) for name, place in own.items()}
        experts = [
            ExpertWeights(self._linear(*one), self._linear(*other), self._bias(*one), self._bias(*other))
            for one, other in self._shard.expert_cuts(index)
        ]
        norms = {name: self._norm(module) for name, module in norm_modules(self._spec, index).items()}
        norms |= {name: self._norm(*each) for name, each in latent_norms(self._spec, index).items()}
        for name in norms.keys() & {"post_attention_norm", "post_mlp_norm"}:
            norms[name].mul_(self._spec.output_scale)
        absent = dict.fromkeys(Norms._fields)
        mixture = self._router(index) | {"experts": experts} if experts else {}
        scales = [self._source.tensor(*each) for each in layer_scale(self._spec, index).items()]
        scale = self._joined(scales, torch.float32) if scales else None
        if scale is not None:  # what is added last is scaled by its norm
            norms["post_mlp_norm" if self._spec.per_layer is None else "input_state_norm"].mul_(scale)
        return LayerWeights(
            qk_norm=self._head_norms(index),
            mixer=self._mixer(index),
            sinks=self._sinks(index),
            scale=scale,
            expansion=expansion,
            **(linears | biases | absent | norms | mixture),
        )

    def _plain(self, place: LinearPlace, cut: Cut) -> Weight:
        """A linear layer that is never quantized here: decays of states follow from its few outputs."""
        modules = [
            (module, self._source.linear(module, (rows, place.inputs)))
            for module, rows in place.modules.items()
        ]
        expanded = [
            (name, weight.dequantized(self._dtype) if isinstance(weight, QuantizedWeight) else weight)
            for name, weight in modules
        ]
        return self._whole(expanded, None, cut)

    def _mixer(self, index: int) -> Mixer | None:
        """The other weights of a recurrent layer's mixer, in float32."""
        shapes = mixer_tensors(self._spec, index)
        if self._spec.mixer is None or not shapes:
            return None

        def read(name: str) -> Tensor:
            return self._joined([self._source.tensor(name, shapes[name])], torch.float32)

        return self._spec.mixer.build(f"model.layers.{index}.", read)

    def _expansion(self, place: LinearPlace | None) -> Tensor | None:
        """The matrices that expand latents, [H, plain + value, rank]; those that are stored quantized are expanded."""
        if place is None:
            return None
        ((module, rows),) = place.modules.items()
        weight = self._source.linear(module, (rows, place.inputs))
        plain = weight.dequantized(self._dtype) if isinstance(weight, QuantizedWeight) else weight
        return self._joined([plain]).view(self._spec.num_heads, -1, place.inputs)

    def _router(self, index: int) -> dict[str, Tensor | None]:
        """The router of a layer with experts. Logits are float32, so the weight is not rounded for them."""
        tensors = {
            name: self._source.tensor(name, shape)
            for name, shape in router_tensors(self._spec, index).items()
        }
        parts = [tensor for tensor in tensors.values() if tensor.dim() == 2]
        brain = self._dtype == torch.bfloat16 and all(part.dtype == torch.bfloat16 for part in parts)
        weight = self._joined(parts, torch.bfloat16 if brain else torch.float32)
        found: dict[str, Tensor | None] = {"router": weight, "correction": None, "router_bias": None}
        for name, tensor in tensors.items():
            if tensor.dim() == 1:
                added = "router_bias" if name.endswith(".bias") else "correction"
                found[added] = self._joined([tensor], torch.float32)
        return found

    def _sinks(self, index: int) -> Tensor | None:
        heads = self._shard.heads
        parts = [
            self._source.tensor(name, shape)[heads.begin : heads.end]
            for name, shape in sink_tensors(self._spec, index).items()
        ]
        return self._joined(parts, torch.float32) if parts else None

    def _linear(self, place: LinearPlace, cut: Cut) -> Weight:
        modules = [
            (module, self._source.linear(module, (rows, place.inputs)))
            for module, rows in place.modules.items()
        ]
        modules += [each for each in modules if each[0] == place.again]
        return self._whole(modules, self._scheme, cut)

    def _whole(self, modules: Sequence[tuple[str, Weight]], scheme: Scheme | None, cut: Cut) -> Weight:
        """The parts of modules that ``cut`` names as one weight, quantized if there is a scheme.

        Parts of different kinds take a common form (`weight.stacked`), or are expanded if there is none. Inputs are cut
        after quantizing, so that the values are those of the whole weight.
        """
        parts: list[Weight] = []
        for (module, weight), ranges in zip(modules, cut.outputs, strict=True):
            for begin, end in ranges:
                part = weight.rows(begin, end) if isinstance(weight, QuantizedWeight) else weight[begin:end]
                part = self._turned(module, part)
                if self._scheme and scheme:
                    if isinstance(part, QuantizedWeight):
                        raise ModelError(
                            "--quantization: the checkpoint is already quantized; omit this option"
                        )
                    part = self._quantized(part, scheme)
                parts.append(_columns(module, part, cut.inputs))
        quantized = [part.to(self._device) for part in parts if isinstance(part, QuantizedWeight)]
        if len(quantized) == len(parts):
            try:
                return stacked(quantized) if len(quantized) > 1 else quantized[0]
            except ValueError:  # no form has the values of all
                parts = list(quantized)
        if quantized and not self._expands:  # once; the start-up output counts them
            self._expands = True
            logger.warning(
                "%s: is computed as one with weights of another kind, so it is expanded to %s; others may be too",
                *(modules[0][0], str(self._dtype).removeprefix("torch.")),
            )
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

    def _bias(self, place: LinearPlace, cut: Cut) -> Tensor | None:
        """The bias of the outputs; where the products of the ranks are added, only the first rank has it."""
        if not place.bias or (cut.inputs.size < place.inputs and self._shard.place.tensor_rank):
            return None
        biases = [
            self._turned(module, self._source.tensor(f"{module}.bias", (rows,))[begin:end])
            for (module, rows), ranges in zip(place.modules.items(), cut.outputs, strict=True)
            for begin, end in ranges
        ]
        return self._joined(biases)

    def _norm(self, module: str, width: int | None = None) -> Tensor:
        norm = self._source.tensor(f"{module}.weight", (width or self._spec.hidden_size,))
        return self._joined([norm], torch.float32).add_(self._spec.norm_offset)

    def _head_norms(self, index: int) -> Tensor | None:
        """The weights of every head of the queries, then of the keys; those of one head are the same for all. Values
        that are normalized too have ones.
        """
        norms = head_norms(self._spec, index)
        if not norms:
            return None
        (heads, kv_heads, size), local = self._spec.heads_of(index), self._shard.spec
        if self._shard.place.size > 1:
            heads, kv_heads = local.num_heads, local.num_kv_heads
        parts = [
            self._turned(module, self._source.tensor(f"{module}.weight", (width,)))
            .view(-1, size)
            .expand(count, size)
            for (module, width), count in zip(norms.items(), (heads, kv_heads), strict=False)
        ]
        if self._spec.qk_norm == "values" and len(norms) == 2:
            parts.append(torch.ones(kv_heads, size))
        return self._joined(parts, torch.float32).add_(self._spec.norm_offset)

    def _turned(self, module: str, rows: W) -> W:
        """Whole heads of queries or keys whose pairs of neighbours rotate, in the order of the kernels: the first
        features of all pairs, then the second ones. Products of queries and keys stay the same.
        """
        order = turned_order(self._spec, module, rows.shape[0])
        if order is None:
            return rows
        return rows.reordered(order) if isinstance(rows, QuantizedWeight) else rows[order]


def turned_order(spec: DecoderSpec, module: str, rows: int) -> Tensor | None:
    """The order in which the kernels have whole heads of ``rows`` outputs of a module; None: as stored."""
    if not spec.interleaved_rope or not module.endswith(_TURNING):
        return None
    turning, latent = spec.ropes[0].rotary_dim, spec.latent
    pairs = torch.cat((torch.arange(0, turning, 2), torch.arange(1, turning, 2)))
    if latent is None:
        size = spec.head_dim
        head = torch.cat((pairs, torch.arange(turning, size)))
    else:  # what rotates is last, in heads of queries and behind the latent
        before = latent.plain if module.endswith(("q_proj", "q_b_proj")) else latent.rank
        size = before + turning
        head = torch.cat((torch.arange(before), before + pairs))
    return (torch.arange(0, rows, size)[:, None] + head).flatten()


def _columns(module: str, weight: Weight, inputs: Range) -> Weight:
    """Some inputs of a weight."""
    if not isinstance(weight, QuantizedWeight):
        return weight[:, inputs.begin : inputs.end]
    try:
        return weight.columns(*inputs)
    except ValueError as error:
        raise ModelError(f"{TENSOR}: {module}: {error}; use a smaller size") from error


def split_experts(checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Give experts that are stored as one tensor of a layer the names of experts that are stored apart.

    Checkpoints differ in this and in the names of the block and the router: those that transformers 5 has in memory
    are also understood.
    """
    experts = spec.experts
    if experts is None:
        return
    names, width = experts.names, experts.width
    stored = set(checkpoint.names)
    for index in (index for index, layer in enumerate(spec.layers) if layer.experts):
        layer = f"model.layers.{index}."
        block = f"{layer}{names.block}."
        others = [f"{layer}{each}." for each in ("mlp", "block_sparse_moe") if each != names.block]
        for wanted in (f"{names.router}.weight", names.correction):
            also = [f"{block}router.weight"] if wanted.endswith(".weight") else []
            _rename(checkpoint, stored, block + wanted, [*also, *_known_as(wanted, others)])
        if names.shared == "shared_mlp":
            _split_shared(checkpoint, stored, f"{layer}{names.shared}.", f"{block}{names.shared}.")
        if experts.interleaved:
            _split_interleaved(checkpoint, f"{block}experts", spec.hidden_size, experts)
            continue
        first = ("experts.gate_up_proj", "input_linear.weight") if spec.gated else ("experts.up_proj",)
        halves = ((names.gate, 0, width), (names.up, width, 2 * width))
        for fused, parts in (
            (first, halves if spec.gated else ((names.up, 0, width),)),
            (("experts.down_proj", "output_linear.weight"), ((names.down, 0, spec.hidden_size),)),
        ):
            for name in (f"{prefix}{each}" for prefix in (block, *others) for each in fused):
                if name in stored:
                    _split(checkpoint, name, f"{block}experts", experts.routing.experts, parts)


def _split_shared(checkpoint: Checkpoint, stored: Collection[str], prefix: str, target: str) -> None:
    """Names for the parts of a shared expert that is stored beside the others, its gate and up as one (Granite 4)."""
    merged, down = f"{prefix}input_linear.weight", f"{prefix}output_linear.weight"
    if merged not in stored or down not in stored:
        return
    half = checkpoint.read(merged).shape[0] // 2
    checkpoint.add_part(f"{target}gate_proj.weight", merged, slice(0, half))
    checkpoint.add_part(f"{target}up_proj.weight", merged, slice(half, None))
    checkpoint.add_name(f"{target}down_proj.weight", down)
    checkpoint.forget(merged)
    checkpoint.forget(down)


def _known_as(wanted: str, blocks: Sequence[str]) -> list[str]:
    """Other names of a router's tensor, in other blocks."""
    last = "gate.weight" if wanted.endswith(".weight") else "e_score_correction_bias"
    return [f"{block}{prefix}{last}" for block in blocks for prefix in ("", "gate.")]


def _rename(checkpoint: Checkpoint, stored: Collection[str], name: str, others: Sequence[str]) -> None:
    for other in others:
        if other in stored and name not in stored:
            checkpoint.add_name(name, other)
            checkpoint.forget(other)
            return


def _split(
    checkpoint: Checkpoint, name: str, prefix: str, experts: int, parts: Sequence[tuple[str, int, int]]
) -> None:
    """Names for the rows of each expert in the tensor ``name`` [experts, rows, inputs], in place of its own.

    Qwen3-VL stores them as columns, [experts, inputs, rows].
    """
    shape, rows = checkpoint.read(name).shape, parts[-1][2]
    if len(shape) != 3 or shape[0] != experts or rows not in shape[1:]:
        raise ModelError(
            f"{checkpoint.folder}: {name} has shape {list(shape)}, the config says {experts} experts of {rows} rows"
        )
    turned = shape[1] != rows
    before = (slice(None),) if turned else ()
    for number in range(experts):
        for module, begin, end in parts:
            part = f"{prefix}.{number}.{module}.weight"
            checkpoint.add_part(part, name, number, *before, slice(begin, end), turned=turned)
    checkpoint.forget(name)


_SUFFIXES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
"""What a tensor of all experts is, by the end of its name."""


def _split_interleaved(checkpoint: Checkpoint, prefix: str, hidden: int, experts: ExpertsSpec) -> None:
    """Names for the parts of each expert in tensors whose outputs are by turns those of gates and those beside them."""
    names, count, width = experts.names, experts.routing.experts, experts.width
    halves = {names.gate: slice(0, None, 2), names.up: slice(1, None, 2)}
    fused = (
        ("gate_up_proj", halves, 2 * width, hidden),
        ("down_proj", {names.down: slice(None)}, hidden, width),
    )
    for stem, modules, outputs, inputs in fused:
        for end, suffix in _SUFFIXES.items():
            name = f"{prefix}.{stem}{end}"
            if name not in checkpoint.names:
                continue
            turned, shape = suffix == "weight", tuple(checkpoint.read(name).shape)
            expected = (count, inputs, outputs) if turned else (count, outputs)
            if shape[: len(expected)] != expected:
                raise ModelError(
                    f"{checkpoint.folder}: {name} has shape {list(shape)}, the config says {count} experts of {outputs}"
                    f" outputs and {inputs} inputs"
                )
            before = (slice(None),) if turned else ()
            for number in range(count):
                for module, rows in modules.items():
                    part = f"{prefix}.{number}.{module}.{suffix}"
                    checkpoint.add_part(part, name, number, *before, rows, turned=turned)
            checkpoint.forget(name)


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
    behind = range(spec.num_layers, spec.num_layers + spec.draft_layers)
    drafts = tuple(f"model.layers.{index}." for index in behind)
    other_part = spec.nested_checkpoint and name.startswith(_OTHER_PARTS)
    other_part = other_part or (spec.mixer is not None and name.startswith(_DRAFTS))
    return other_part or name.startswith((*drafts, *_unread(spec))) or name.endswith(_HARMLESS)


def _unread(spec: DecoderSpec) -> list[str]:
    """The tensors that layers without keys and values of their own may have all the same."""
    return [
        f"model.layers.{index}.self_attn.{name}"
        for index, layer in enumerate(spec.layers)
        if layer.shares is not None
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    ]


def _void_bias(checkpoint: Checkpoint, name: str, spec: DecoderSpec) -> bool:
    """Some writers of quantized checkpoints add a bias of zeros to every linear layer."""
    return spec.stored is not None and name.endswith(".bias") and not checkpoint.read(name).any()


def plain_name(name: str) -> str:
    """The name of a text model's tensor when the model stands alone; handles older and newer nesting, and a checkpoint
    that was saved without its head.
    """
    for nested, plain in _PREFIXES:
        if name.startswith(nested):
            return plain + name.removeprefix(nested)
    return name


def names_for(spec: DecoderSpec) -> Callable[[str], str]:
    """Maps a tensor's name in a checkpoint to its name here."""

    def name_of(stored: str) -> str:
        name = plain_name(stored)
        for given, here in spec.renamed:
            if name.startswith(given):
                return here + name.removeprefix(given)
        return name

    return name_of


def digest(kind: str, tensors: Iterable[Tensor]) -> str:
    """A digest of a kind of weights, and of every tensor's shape and elements spread over it."""
    found = hashlib.sha256(kind.encode())
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
        found.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(part: Weight | None) -> tuple[Tensor, ...]:
    if part is None:
        return ()
    return part.tensors() if isinstance(part, QuantizedWeight) else (part,)


def _kinds(weights: DecoderWeights) -> str:
    """The number of linear layers of each kind: ``28 W4A16 in groups of 128, 1 W8A8``."""
    linears = [
        w
        for layer in weights.layers
        for w in (
            *(layer.qkv, layer.gates, layer.output, layer.gate_up, layer.down),
            *(layer.input_gate, layer.input_projection, layer.query),
        )
    ]
    experts = [w for layer in weights.layers for one in layer.experts or () for w in (one.gate_up, one.down)]
    every = [weight for weight in (*linears, *experts, weights.head) if weight is not None]
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
