"""From a Hugging Face checkpoint to GGUF: names, the order of the rows that are rotated, and by how much they are.

The names are those of llama.cpp's architectures ``llama``, ``qwen3``, ``qwen3moe`` and ``qwen35``. It rotates
neighbouring elements of a head for ``llama`` where Hugging Face rotates its two halves, so the rows of queries and keys
are interleaved for it; for the others it rotates halves too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from benchmarks.peers.shapes import Shape

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_WHOLE_NAMES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
"""Tensors whose names do not end in ``.weight``."""

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
"""llama.cpp's name of each ``model_type``."""


def to_gguf(name: str, model_type: str = "") -> str:
    """The GGUF name of a tensor of a checkpoint of ``model_type``.

    The experts of a layer are one tensor there, in the order of numbers.

    Raises:
        KeyError: no tensor of these families is called so.
    """
    stem = name.removesuffix(".weight")
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        part = re.sub(r"(?<=experts\.)\d+\.", "", found[2])
        if part in _WHOLE_NAMES:
            return f"blk.{found[1]}.{_WHOLE_NAMES[part]}"
        if part == "post_attention_layernorm" and model_type == "qwen3_5_text":
            return f"blk.{found[1]}.post_attention_norm.weight"
        return f"blk.{found[1]}.{_LAYER[part]}.weight"
    return f"{_WHOLE[stem]}.weight"


def interleaved(rows: int, heads: int) -> Sequence[int]:
    """Which row of a checkpoint's matrix of ``heads`` heads goes where, for neighbours to be rotated together."""
    size = rows // heads
    half = size // 2
    return [head * size + part * half + i for head in range(heads) for i in range(half) for part in range(2)]


def rope_factors(shape: Shape) -> list[float]:
    """What each frequency of the rotation is divided by, after Llama 3.1's rule."""
    told = shape.rope_scaling
    assert told is not None
    low = told["original_max_position_embeddings"] / told["low_freq_factor"]
    high = told["original_max_position_embeddings"] / told["high_freq_factor"]
    factors = []
    for i in range(0, shape.head_dim, 2):
        length = 2 * math.pi * shape.rope_theta ** (i / shape.head_dim)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(told["factor"])
        else:
            turns = told["original_max_position_embeddings"] / length
            smooth = (turns - told["low_freq_factor"]) / (told["high_freq_factor"] - told["low_freq_factor"])
            factors.append(1.0 / ((1.0 - smooth) / told["factor"] + smooth))
    return factors
