"""Small random models as GGUF files, and the checkpoint in safetensors that holds the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file

from headrace.compute.model.gguf.file import TYPES, TensorType
from tests.compute.model.gguf.files import Entry, write

FLOATS = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the float16 of a block are; all other bytes may have any value."""

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, SIZE, VOCAB = 256, 512, 2, 4, 2, 64, 48
EXPERTS, CHOSEN, NARROW, SHARED = 5, 2, 256, 512

SIZES: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": HIDDEN,
    "block_count": LAYERS,
    "feed_forward_length": WIDE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": SIZE,
    "attention.value_length": SIZE,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "float32",
    "tie_word_embeddings": False,
}

_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}

_ROUTED = {"expert_count": EXPERTS, "expert_used_count": CHOSEN}
_BLOCK_SPARSE = ("block_sparse_moe", "w1", "w3", "w2")
_MLP = ("mlp", "gate_proj", "up_proj", "down_proj")
_GRANITE: dict[str, Any] = {
    "fields": {
        "attention.scale": 0.125,
        "embedding_scale": 12.0,
        "residual_scale": 0.25,
        "logit_scale": 8.0,
    },
    "config": {
        "attention_multiplier": 0.125,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"name": "LlamaForCausalLM"},
    "granite": {"name": "GraniteForCausalLM"} | _GRANITE,
    "granitemoe": {
        "name": "GraniteMoeForCausalLM",
        "fields": _GRANITE["fields"] | _ROUTED,
        "config": _GRANITE["config"] | {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
        "experts": ("block_sparse_moe", *_MLP[1:]),
        "router": "block_sparse_moe.router.layer",
        "width": WIDE,
    },
    "mixtral": {
        "architecture": "llama",
        "name": "MixtralForCausalLM",
        "fields": _ROUTED,
        "config": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
        "experts": _BLOCK_SPARSE,
        "router": "block_sparse_moe.gate",
        "width": WIDE,
    },
    "olmoe": {
        "name": "OlmoeForCausalLM",
        "fields": _ROUTED,
        "config": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": False},
        "experts": _MLP,
        "router": "mlp.gate",
        "width": WIDE,
        "normed": True,
        "normed_whole": True,
    },
    "qwen2moe": {
        "name": "Qwen2MoeForCausalLM",
        "biased": True,
        "fields": _ROUTED
        | {"expert_feed_forward_length": NARROW, "expert_shared_feed_forward_length": SHARED},
        "config": {
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": NARROW,
            "shared_expert_intermediate_size": SHARED,
            "norm_topk_prob": False,
        },
        "experts": _MLP,
        "router": "mlp.gate",
        "width": NARROW,
        "shared": "mlp.shared_expert",
    },
    "qwen3moe": {
        "name": "Qwen3MoeForCausalLM",
        "normed": True,
        "fields": _ROUTED | {"expert_feed_forward_length": NARROW},
        "config": {
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": NARROW,
            "norm_topk_prob": True,
        },
        "experts": _MLP,
        "router": "mlp.gate",
        "width": NARROW,
    },
    "qwen2": {"name": "Qwen2ForCausalLM", "biased": True},
    "qwen3": {"name": "Qwen3ForCausalLM", "normed": True},
    "gemma": {"name": "GemmaForCausalLM", "tied": True},
    "gemma2": {
        "name": "Gemma2ForCausalLM",
        "tied": True,
        "norms": _GEMMA_NORMS,
        "fields": {"attention.sliding_window": 16},
        "config": {"sliding_window": 16, "query_pre_attn_scalar": SIZE},
    },
    "gemma3": {
        "name": "Gemma3ForCausalLM",
        "tied": True,
        "norms": _GEMMA_NORMS,
        "normed": True,
        "fields": {"attention.sliding_window": 16},
        "config": {"sliding_window": 16, "query_pre_attn_scalar": SIZE},
    },
    "phi3": {"name": "Phi3ForCausalLM", "merged": True},
}
"""What an architecture has besides the names of Llama; ``architecture`` is its name in a file if that is another."""


def kind_of(name: str) -> TensorType:
    return next(each for each in TYPES.values() if each.name == name)


def random_blocks(kind: TensorType, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Blocks of a quantized type, uint8 [rows, bytes], whose weights are small."""
    rng = np.random.default_rng((kind.size, seed))
    data = rng.integers(0, 256, (rows, inputs // kind.block, kind.size), dtype=np.uint8)
    for at in FLOATS[kind.name]:
        floats = rng.normal(0, 0.0001 if kind.block == 256 else 0.002, data.shape[:2]).astype("<f2")
        data[..., at : at + 2] = floats[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def write_pair(
    folder: Path, architecture: str, types: Mapping[str, str], table: str = "Q8_0"
) -> tuple[Path, Path]:
    """A file with linear layers of ``types`` by name, and a folder with the same weights in float32."""
    family = FAMILIES[architecture]
    architecture = family.get("architecture", architecture)
    entries: list[Entry] = []
    tensors: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(1)

    def matrix(name: str, module: str, rows: int, inputs: int, kind: str) -> None:
        if kind in FLOATS:
            data = random_blocks(kind_of(kind), rows, inputs, len(entries))
        else:
            values = rng.normal(0, 0.05, (rows, inputs)).astype(np.float32)
            data = quants.quantize(values, GGMLQuantizationType[kind])
        entries.append(Entry(f"{name}.weight", (rows, inputs), GGMLQuantizationType[kind], data.tobytes()))
        exact = quants.dequantize(data, GGMLQuantizationType[kind]).reshape(rows, inputs)
        tensors[f"{module}.weight"] = _as_published(architecture, module, exact.astype(np.float32))

    def experts(name: str, modules: list[str], rows: int, inputs: int, kind: str) -> None:
        """One tensor of all experts, as blocks whose types ``matrix`` makes one by one."""
        first = len(entries)
        for module in modules:
            matrix(name, module, rows, inputs, kind)
        together = b"".join(entry.data for entry in entries[first:])
        shape, stored = (len(modules), rows, inputs), entries[first].type
        entries[first:] = [Entry(f"{name}.weight", shape, stored, together)]

    def vector(name: str, module: str, size: int, suffix: str = "weight") -> None:
        values = rng.normal(1, 0.2, size).astype(np.float32)
        entries.append(Entry(f"{name}.{suffix}", (size,), GGMLQuantizationType.F32, values.tobytes()))
        tensors[f"{module}.{suffix}"] = _as_published(architecture, module, values)

    matrix("token_embd", "model.embed_tokens", VOCAB, HIDDEN, table)
    vector("output_norm", "model.norm", HIDDEN)
    if not family.get("tied"):
        matrix("output", "lm_head", VOCAB, HIDDEN, types["output"])
    for index in range(LAYERS):
        block, layer = f"blk.{index}.", f"model.layers.{index}."
        for name, (module, rows, inputs) in _linears(family).items():
            matrix(block + name, layer + module, rows, inputs, types.get(name, types["ffn_down"]))
            if family.get("biased") and name in ("attn_q", "attn_k", "attn_v"):
                vector(block + name, layer + module, rows, "bias")
        for name, module in family.get("norms", _NORMS).items():
            vector(block + name, layer + module, HIDDEN)
        if family.get("normed"):
            heads = (HEADS, KV_HEADS) if family.get("normed_whole") else (1, 1)
            vector(f"{block}attn_q_norm", f"{layer}self_attn.q_norm", heads[0] * SIZE)
            vector(f"{block}attn_k_norm", f"{layer}self_attn.k_norm", heads[1] * SIZE)
        if names := family.get("experts"):
            wide = family["width"]
            sizes = {"ffn_gate": (wide, HIDDEN), "ffn_up": (wide, HIDDEN), "ffn_down": (HIDDEN, wide)}
            for (name, size), own in zip(sizes.items(), names[1:], strict=True):
                modules = [f"{layer}{names[0]}.experts.{number}.{own}" for number in range(EXPERTS)]
                experts(f"{block}{name}_exps", modules, *size, types[name])
            matrix(f"{block}ffn_gate_inp", f"{layer}{family['router']}", EXPERTS, HIDDEN, "F32")
        if shared := family.get("shared"):
            matrix(f"{block}ffn_gate_shexp", f"{layer}{shared}.gate_proj", SHARED, HIDDEN, types["ffn_gate"])
            matrix(f"{block}ffn_up_shexp", f"{layer}{shared}.up_proj", SHARED, HIDDEN, types["ffn_up"])
            matrix(f"{block}ffn_down_shexp", f"{layer}{shared}.down_proj", HIDDEN, SHARED, types["ffn_down"])
            matrix(f"{block}ffn_gate_inp_shexp", f"{layer}{shared}_gate", 1, HIDDEN, "F32")
            entries[-1] = entries[-1]._replace(shape=(HIDDEN,))  # as converters write it
    metadata = {"general.architecture": architecture} | {
        f"{architecture}.{name}": value for name, value in (SIZES | family.get("fields", {})).items()
    }
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    config = CONFIG | {"architectures": [family["name"]]} | family.get("config", {})
    config |= {"tie_word_embeddings": bool(family.get("tied"))}
    (checkpoint / "config.json").write_text(json.dumps(config))
    save_file(tensors, checkpoint / "model.safetensors")
    return write(folder / "model.gguf", metadata, entries), checkpoint


def _linears(family: Mapping[str, Any]) -> dict[str, tuple[str, int, int]]:
    queries, keys = HEADS * SIZE, KV_HEADS * SIZE
    output = {"attn_output": ("self_attn.o_proj", HIDDEN, queries)}
    down = output | {"ffn_down": ("mlp.down_proj", HIDDEN, WIDE)}
    if family.get("merged"):
        return {
            "attn_qkv": ("self_attn.qkv_proj", queries + 2 * keys, HIDDEN),
            "ffn_up": ("mlp.gate_up_proj", 2 * WIDE, HIDDEN),
        } | down
    attention = {
        "attn_q": ("self_attn.q_proj", queries, HIDDEN),
        "attn_k": ("self_attn.k_proj", keys, HIDDEN),
        "attn_v": ("self_attn.v_proj", keys, HIDDEN),
    }
    if family.get("experts"):
        return attention | output
    return (
        attention
        | {"ffn_gate": ("mlp.gate_proj", WIDE, HIDDEN), "ffn_up": ("mlp.up_proj", WIDE, HIDDEN)}
        | down
    )


def _as_published(architecture: str, module: str, values: np.ndarray) -> torch.Tensor:
    """What llama.cpp's conversion has changed, undone."""
    if architecture in ("llama", "granite", "granitemoe") and module.endswith(("q_proj", "k_proj")):
        heads = len(values) // SIZE
        values = values.reshape(heads, SIZE // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and module.endswith("norm"):
        values = values - np.float32(1)
    return torch.from_numpy(np.ascontiguousarray(values))
