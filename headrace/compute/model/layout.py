"""The layout of a checkpoint: its tensors by their Hugging Face names, and which of them become one weight.

`weights` loads a decoder with it, and the writer of quantized checkpoints uses it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from headrace.compute.checkpoint import Checkpoint, ExpertPlace, LinearPlace, ModelError, interleaved
from headrace.compute.model.spec import DecoderSpec, LatentSpec
from headrace.compute.quantization.layouts import Mxfp4Layout
from headrace.compute.quantization.scheme import LinearLayout
from headrace.compute.quantization.weight import QuantizedWeight

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
PER_LAYER_TABLE, PER_LAYER_PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
PER_LAYER_NORM = "model.per_layer_projection_norm"


def linear_places(spec: DecoderSpec, index: int) -> dict[str, LinearPlace]:
    """The linear layers of layer ``index``, by their fields of `weights.LayerWeights`, except those of experts."""
    prefix, names = f"model.layers.{index}.", spec.names
    mlp, hidden, wide = f"{prefix}{names.mlp}.", spec.hidden_size, spec.intermediate_of(index)
    gates = {f"{mlp}{names.gate}": wide} if spec.gated else {}
    gate_up = gates | {f"{mlp}{names.up}": wide}
    if spec.merged_gate_up:
        gate_up = {f"{mlp}{names.gate_up}": 2 * wide}
    layer = spec.layers[index]
    if spec.mixer is not None and layer.recurrent:
        places = spec.mixer.places(prefix)
        if layer.beside:
            own = {"mixer_first": places["qkv"], "mixer_output": places["output"]}
            places = own | _attention_places(spec, index)
    elif spec.latent is not None:
        places = _latent_attention_places(spec, spec.latent, prefix)
    else:
        places = _attention_places(spec, index)
    if layer.feeds and not layer.experts:
        places["gate_up"] = LinearPlace(gate_up, hidden, spec.mlp_bias)
        places["down"] = LinearPlace({f"{mlp}{names.down}": hidden}, wide, spec.mlp_bias)
    return places


def _attention_places(spec: DecoderSpec, index: int) -> dict[str, LinearPlace]:
    """The linear layers of attention."""
    attention, hidden, layer = f"model.layers.{index}.self_attn.", spec.hidden_size, spec.layers[index]
    heads, kv_heads, size = spec.heads_of(index)
    queries, keys = heads * size, kv_heads * size
    others = {f"{attention}k_proj": keys}
    again = f"{attention}k_proj" if layer.values_from_keys else None
    if again is None:
        others[f"{attention}v_proj"] = keys
    if layer.shares is not None:
        others = {}
    qkv = {f"{attention}q_proj": queries} | others
    if spec.merged_qkv:
        qkv = {f"{attention}qkv_proj": queries + 2 * keys}
    places = {
        "qkv": LinearPlace(qkv, hidden, spec.qkv_bias, again=again),
        "output": LinearPlace({f"{attention}{spec.names.output}": hidden}, queries, spec.output_bias),
    }
    if spec.gated_attention:
        stored = {f"{attention}q_proj": 2 * queries}
        each, whole = (size, size), ((0, keys),)
        parts = interleaved(heads, each, (0,)), whole, whole
        places["qkv"] = LinearPlace(stored | others, hidden, spec.qkv_bias, parts)
        gates = (interleaved(heads, each, (1,)),)
        places["gates"] = LinearPlace(stored, hidden, spec.qkv_bias, gates)
    return places


def _latent_attention_places(spec: DecoderSpec, of: LatentSpec, layer: str) -> dict[str, LinearPlace]:
    """The first and the last linear layer of attention over latents."""
    attention, heads = f"{layer}self_attn.", spec.num_heads
    first = {"q_proj": heads * of.head} if of.query_rank is None else {"q_a_proj": of.query_rank}
    first["kv_a_proj_with_mqa"] = of.kept
    qkv = {f"{attention}{name}": rows for name, rows in first.items()}
    output = {f"{attention}{spec.names.output}": spec.hidden_size}
    return {
        "qkv": LinearPlace(qkv, spec.hidden_size, spec.qkv_bias),
        "output": LinearPlace(output, heads * of.value, spec.output_bias),
    }


def latent_places(spec: DecoderSpec, index: int) -> dict[str, LinearPlace]:
    """The linear layers of attention over latents beside the first and the last one, by their fields of
    `weights.LayerWeights`.
    """
    of = spec.latent
    if of is None:
        return {}
    prefix, heads = f"model.layers.{index}.self_attn.", spec.num_heads
    places = {"expansion": LinearPlace({f"{prefix}kv_b_proj": heads * (of.plain + of.value)}, of.rank, False)}
    if of.query_rank is not None:
        places["query"] = LinearPlace({f"{prefix}q_b_proj": heads * of.head}, of.query_rank, False)
    return places


def latent_norms(spec: DecoderSpec, index: int) -> dict[str, tuple[str, int]]:
    """The norms of attention over latents: field of `weights.LayerWeights` -> module and size."""
    of = spec.latent
    if of is None:
        return {}
    prefix = f"model.layers.{index}.self_attn."
    norms = {"latent_norm": (f"{prefix}kv_a_layernorm", of.rank)}
    if of.query_rank is not None:
        norms["query_norm"] = f"{prefix}q_a_layernorm", of.query_rank
    return norms


def per_layer_places(spec: DecoderSpec, index: int) -> dict[str, LinearPlace]:
    """The linear layers that add its input to layer ``index``, by their fields of `weights.LayerWeights`."""
    if spec.per_layer is None:
        return {}
    prefix, hidden, width = f"model.layers.{index}.", spec.hidden_size, spec.per_layer.width
    return {
        "input_gate": LinearPlace({f"{prefix}per_layer_input_gate": width}, hidden, False),
        "input_projection": LinearPlace({f"{prefix}per_layer_projection": hidden}, width, False),
    }


def layer_scale(spec: DecoderSpec, index: int) -> dict[str, tuple[int, ...]]:
    """The tensor with the number that multiplies the result of layer ``index``, and its shape, if there is one."""
    return {f"model.layers.{index}.layer_scalar": (1,)} if spec.layer_scales else {}


def expert_places(spec: DecoderSpec, index: int) -> list[ExpertPlace]:
    """The experts of layer ``index``, the shared one last; none if it has an MLP."""
    experts = spec.experts
    if experts is None or not spec.layers[index].experts:
        return []
    names, hidden = experts.names, spec.hidden_size
    block = f"model.layers.{index}.{names.block}."

    def place(prefix: str, gate: str, up: str, down: str, width: int) -> ExpertPlace:
        gates = {f"{prefix}.{gate}": width} if spec.gated else {}
        gate_up = gates | {f"{prefix}.{up}": width}
        last, biased = {f"{prefix}.{down}": hidden}, experts.biased
        return ExpertPlace(LinearPlace(gate_up, hidden, biased), LinearPlace(last, width, biased))

    own = (names.gate, names.up, names.down)
    places = [
        place(f"{block}experts.{number}", *own, experts.width) for number in range(experts.routing.experts)
    ]
    if experts.shared_width:
        usual = ("gate_proj", "up_proj", "down_proj")
        places.append(place(f"{block}{names.shared}", *usual, experts.shared_width))
    return places


def router_tensors(spec: DecoderSpec, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the router in layer ``index`` and their shapes: weight, gate of the shared expert, correction or
    bias.
    """
    experts = spec.experts
    if experts is None or not spec.layers[index].experts:
        return {}
    routing, block = experts.routing, f"model.layers.{index}.{experts.names.block}."
    tensors: dict[str, tuple[int, ...]] = {
        f"{block}{experts.names.router}.weight": (routing.experts, spec.hidden_size)
    }
    if routing.shared == "gated":
        tensors[f"{block}{experts.names.shared}_gate.weight"] = (1, spec.hidden_size)
    if experts.corrected:
        tensors[f"{block}{experts.names.correction}"] = (routing.experts,)
    if experts.biased:
        tensors[f"{block}{experts.names.router}.bias"] = (routing.experts,)
    return tensors


def mixer_tensors(spec: DecoderSpec, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the mixer in layer ``index`` that are not linear layers, and their shapes."""
    if spec.mixer is None or not spec.layers[index].recurrent:
        return {}
    return spec.mixer.tensors(f"model.layers.{index}.")


def norm_modules(spec: DecoderSpec, index: int) -> dict[str, str]:
    """The norms over the hidden state of layer ``index``: field of `weights.LayerWeights` -> module."""
    own = {"input_state_norm": "post_per_layer_input_norm"} if spec.per_layer is not None else {}
    names = spec.norms_of(index) | own
    return {field: f"model.layers.{index}.{name}" for field, name in names.items()}


def head_norms(spec: DecoderSpec, index: int) -> dict[str, int]:
    """The norms of queries and of keys in layer ``index``, in this order: module -> size; empty without them.

    A layer that shares keys has none of them.
    """
    if spec.qk_norm is None or not spec.layers[index].attends:
        return {}
    queries, keys = (
        ("query_layernorm", "key_layernorm") if spec.qk_norm == "rotated" else ("q_norm", "k_norm")
    )
    queries, keys = spec.names.query_norm or queries, spec.names.key_norm or keys
    heads, kv_heads, size = spec.heads_of(index)
    together = (heads, kv_heads) if spec.qk_norm == "projection" else (1, 1)
    prefix = f"model.layers.{index}.self_attn."
    of_queries = {f"{prefix}{queries}": together[0] * size}
    if spec.layers[index].shares is not None:
        return of_queries
    return of_queries | {f"{prefix}{keys}": together[1] * size}


def sink_tensors(spec: DecoderSpec, index: int) -> dict[str, tuple[int, ...]]:
    """The attention sinks of layer ``index`` and their shape; empty without them."""
    return {f"model.layers.{index}.self_attn.sinks": (spec.num_heads,)} if spec.sinks else {}


def linear_modules(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every linear layer of a checkpoint and its shape [out, in], the head last; a tied head is not listed."""
    for index in range(spec.num_layers):
        experts = (place for pair in expert_places(spec, index) for place in pair)
        own = (*per_layer_places(spec, index).values(), *latent_places(spec, index).values())
        modules = {
            module: (outputs, place.inputs)
            for place in (*linear_places(spec, index).values(), *own, *experts)
            for module, outputs in place.modules.items()
        }
        yield from modules.items()
    if spec.per_layer is not None:
        yield PER_LAYER_PROJECTION, (spec.per_layer_features, spec.hidden_size)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def other_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that is not the weight of a linear layer: embedding, norms, routers, biases; names and shapes."""
    yield f"{EMBEDDING}.weight", (spec.vocab_size, spec.hidden_size)
    yield f"{spec.names.final_norm}.weight", (spec.hidden_size,)
    if spec.per_layer is not None:
        yield f"{PER_LAYER_TABLE}.weight", (spec.per_layer.vocab_size, spec.per_layer_features)
        yield f"{PER_LAYER_NORM}.weight", (spec.per_layer.width,)
    for index in range(spec.num_layers):
        yield from layer_scale(spec, index).items()
        for module in norm_modules(spec, index).values():
            yield f"{module}.weight", (spec.hidden_size,)
        for module, size in (*head_norms(spec, index).items(), *latent_norms(spec, index).values()):
            yield f"{module}.weight", (size,)
        yield from router_tensors(spec, index).items()
        yield from mixer_tensors(spec, index).items()
        yield from sink_tensors(spec, index).items()
        experts = (place for pair in expert_places(spec, index) for place in pair)
        for place in (*linear_places(spec, index).values(), *experts):
            if place.bias:
                for module, outputs in place.modules.items():
                    yield f"{module}.bias", (outputs,)


def plain_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint whose linear layers are not quantized."""
    weights = {f"{module}.weight": shape for module, shape in linear_modules(spec)}
    return dict(other_tensors(spec)) | weights


# Sources of a decoder's weights by the names of a checkpoint: its files, or random numbers.

Weight: TypeAlias = Tensor | QuantizedWeight


class Source(Protocol):
    """A source of weights."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def linear(self, module: str, shape: tuple[int, int]) -> Weight: ...

    def embedding(self, shape: tuple[int, int]) -> Weight:
        """The table of the tokens' embeddings [vocab, hidden], which may be quantized."""


class StoredSource:
    """A checkpoint, whose linear layers may be stored in a quantized format; fp8 is expanded unless ``fp8``."""

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec, *, fp8: bool) -> None:
        self._checkpoint = checkpoint
        self._format = spec.stored
        self._fp8 = fp8

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(name, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        layout = self._format.layout_of(module) if self._format else None
        if layout is None:
            return self.tensor(f"{module}.weight", shape)
        weight = read_linear(self._checkpoint, layout, module, shape)
        expanded = isinstance(weight, QuantizedWeight) and weight.in_fp8 and not self._fp8
        return weight.dequantized() if isinstance(weight, QuantizedWeight) and expanded else weight

    def embedding(self, shape: tuple[int, int]) -> Tensor:
        return self.tensor(f"{EMBEDDING}.weight", shape)


def parts_of(checkpoint: Checkpoint, layout: LinearLayout, module: str) -> dict[str, str]:
    """The names of the tensors in which a checkpoint stores a linear layer, by their suffixes."""
    names = {suffix: f"{module}.{suffix}" for suffix in (*layout.required, *layout.optional)}
    return {suffix: name for suffix, name in names.items() if name in checkpoint.names}


def read_linear(checkpoint: Checkpoint, layout: LinearLayout, module: str, shape: tuple[int, int]) -> Weight:
    """The weight [out, in] of a linear layer that is stored quantized.

    Raises:
        ModelError: its tensors do not fit the layout.
    """
    parts = parts_of(checkpoint, layout, module)
    try:
        return layout.read({suffix: checkpoint.read(name) for suffix, name in parts.items()}, shape)
    except ValueError as error:
        raise ModelError(f"{checkpoint.folder}: {module}: {error}") from error


class RandomSource:
    """Noise for every linear layer and table, which depends on its name and the seed, and ones for the norms.

    It is drawn in bfloat16 if the config says that weights are stored so, since kernels may keep what has its few bits
    in less memory; else in ``dtype``. Experts that a checkpoint has in MXFP4 are drawn so.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self._format = spec.stored
        self._generator = torch.Generator(device=device)
        self._seed = seed
        self._dtype = torch.bfloat16 if spec.dtype == "bfloat16" else dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(("norm.weight", "layernorm.weight", "layer_scalar")):
            return torch.ones(shape)
        self._generator.manual_seed(zlib.crc32(name.encode(), self._seed))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._generator.device)
        return tensor.normal_(0.0, 0.02, generator=self._generator)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        layout = self._format.layout_of(module) if self._format else None
        if not isinstance(layout, Mxfp4Layout):
            return self.tensor(f"{module}.weight", shape)
        self._generator.manual_seed(zlib.crc32(module.encode(), self._seed))
        return layout.random(shape, self._generator)

    def embedding(self, shape: tuple[int, int]) -> Tensor:
        return self.tensor(f"{EMBEDDING}.weight", shape)
