"""The layout of a checkpoint: its tensors by their Hugging Face names, and which of them become one weight.

`weights` loads a decoder with it, and the writer of quantized checkpoints uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.compute.model.spec import DecoderSpec

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """A linear layer of the decoder, and the modules of the checkpoint whose outputs it stacks.

    ``modules`` are names and outputs, in order. ``inputs`` and ``bias`` are the same for all of them.
    """

    modules: Mapping[str, int]
    inputs: int
    bias: bool


def linear_places(spec: DecoderSpec, index: int) -> dict[str, LinearPlace]:
    """The linear layers of layer ``index``, by their fields of `weights.LayerWeights`."""
    attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
    hidden, wide = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
    gate_up = {f"{mlp}gate_proj": wide, f"{mlp}up_proj": wide}
    if spec.merged_qkv:
        qkv = {f"{attention}qkv_proj": queries + 2 * keys}
    if spec.merged_gate_up:
        gate_up = {f"{mlp}gate_up_proj": 2 * wide}
    return {
        "qkv": LinearPlace(qkv, hidden, spec.qkv_bias),
        "output": LinearPlace({f"{attention}o_proj": hidden}, queries, spec.output_bias),
        "gate_up": LinearPlace(gate_up, hidden, spec.mlp_bias),
        "down": LinearPlace({f"{mlp}down_proj": hidden}, wide, spec.mlp_bias),
    }


def norm_modules(spec: DecoderSpec, index: int) -> dict[str, str]:
    """The norms over the hidden state of layer ``index``: field of `weights.LayerWeights` -> module."""
    return {field: f"model.layers.{index}.{name}" for field, name in spec.norms._asdict().items() if name}


def head_norms(spec: DecoderSpec, index: int) -> dict[str, int]:
    """The norms of queries and of keys in layer ``index``, in this order: module -> size; empty without them."""
    if spec.qk_norm is None:
        return {}
    queries, keys = (
        ("query_layernorm", "key_layernorm") if spec.qk_norm == "rotated" else ("q_norm", "k_norm")
    )
    together = (spec.num_heads, spec.num_kv_heads) if spec.qk_norm == "projection" else (1, 1)
    prefix = f"model.layers.{index}.self_attn."
    return {
        f"{prefix}{queries}": together[0] * spec.head_dim,
        f"{prefix}{keys}": together[1] * spec.head_dim,
    }


def linear_modules(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every linear layer of a checkpoint and its shape [out, in], the head last; a tied head is not listed."""
    for index in range(spec.num_layers):
        for place in linear_places(spec, index).values():
            for module, outputs in place.modules.items():
                yield module, (outputs, place.inputs)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def other_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that is not the weight of a linear layer: embedding, norms, biases; names and shapes."""
    yield f"{EMBEDDING}.weight", (spec.vocab_size, spec.hidden_size)
    yield f"{FINAL_NORM}.weight", (spec.hidden_size,)
    for index in range(spec.num_layers):
        for module in norm_modules(spec, index).values():
            yield f"{module}.weight", (spec.hidden_size,)
        for module, size in head_norms(spec, index).items():
            yield f"{module}.weight", (size,)
        for place in linear_places(spec, index).values():
            if place.bias:
                for module, outputs in place.modules.items():
                    yield f"{module}.bias", (outputs,)


def plain_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint whose linear layers are not quantized."""
    weights = {f"{module}.weight": shape for module, shape in linear_modules(spec)}
    return dict(other_tensors(spec)) | weights
