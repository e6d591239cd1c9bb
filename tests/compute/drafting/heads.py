"""Random EAGLE-3 heads in the published layout, for the built-in model unless sizes say otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "torch_dtype": "float32",
}
ATTENTION, MLP = "midlayer.self_attn.", "midlayer.mlp."


def tensors(target_hidden: int = 256, **fields: Any) -> dict[str, Tensor]:
    """The tensors of a head with these fields of its config."""
    config = CONFIG | fields
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    hidden, wide, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = {
        "fc.weight": draw(hidden, len(config["eagle_aux_hidden_state_layer_ids"]) * target_hidden),
        f"{ATTENTION}q_proj.weight": draw(heads * size, 2 * hidden),
        f"{ATTENTION}k_proj.weight": draw(kv_heads * size, 2 * hidden),
        f"{ATTENTION}v_proj.weight": draw(kv_heads * size, 2 * hidden),
        f"{ATTENTION}o_proj.weight": draw(hidden, heads * size),
        f"{MLP}gate_proj.weight": draw(wide, hidden),
        f"{MLP}up_proj.weight": draw(wide, hidden),
        f"{MLP}down_proj.weight": draw(hidden, wide),
        "norm.weight": draw(hidden).abs() + 1,
    }
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        found[f"midlayer.{norm}.weight"] = draw(hidden).abs() + 0.5
    if "draft_vocab_size" in fields:
        count, vocab = fields["draft_vocab_size"], config["vocab_size"]
        names = torch.randperm(vocab, generator=generator)[:count].sort().values
        found["lm_head.weight"] = draw(count, hidden)
        found["d2t"] = names - torch.arange(count)
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, names, True)
    if hidden != target_hidden:
        found["embed_tokens.weight"] = draw(config["vocab_size"], hidden)
        found.setdefault("lm_head.weight", draw(config["vocab_size"], hidden))
    return found


def write_head(
    folder: Path, change: Callable[[dict[str, Tensor]], Any] = lambda found: None, **fields: Any
) -> Path:
    """Write a head to ``folder``, after ``change`` to its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    found = tensors(**fields)
    change(found)
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    return folder
