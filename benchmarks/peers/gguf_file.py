"""Writes a checkpoint's folder as one GGUF file in bfloat16; runs where the package ``gguf`` is installed.

``python -m benchmarks.peers.gguf_file SHAPE FOLDER FILE``. It reads safetensors by itself: a JSON head and raw
numbers, of which numpy has no bfloat16.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers.gguf_names import ARCHITECTURES, interleaved, rope_factors, to_gguf
from benchmarks.peers.shapes import EVERY, DeltaMixers, Shape
from benchmarks.peers.vocabulary import MERGE, tokens


def read_bfloat16(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file of bfloat16 alone, as uint16 arrays that lie in the file."""
    with file.open("rb") as opened:
        head_bytes = int.from_bytes(opened.read(8), "little")
        head = json.loads(opened.read(head_bytes))
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + head_bytes)
    read = {}
    for name, told in head.items():
        if name != "__metadata__":
            assert told["dtype"] == "BF16", name
            first, last = told["data_offsets"]
            read[name] = data[first:last].view(np.uint16).reshape(told["shape"])
    return read


def merged(tensors: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The tensors by their GGUF names; those of one name, the experts of a layer, as one of [experts, out, in]."""
    parts: dict[str, list[tuple[int, Any]]] = {}
    for name, numbers in tensors.items():
        expert = re.search(r"experts\.(\d+)\.", name)
        parts.setdefault(to_gguf(name, model_type), []).append((int(expert[1]) if expert else -1, numbers))
    return {
        name: found[0][1]
        if found[0][0] < 0
        else np.stack([part for _, part in sorted(found, key=lambda x: x[0])])
        for name, found in parts.items()
    }


def write(shape: Shape, folder: Path, file: Path) -> None:
    """Writes ``file``: matrices in bfloat16 as they are, norms in float32 as llama.cpp wants them."""
    writer = gguf.GGUFWriter(file, ARCHITECTURES[shape.model_type])
    writer.add_name(shape.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    if shape.experts:
        writer.add_expert_count(shape.experts.count)
        writer.add_expert_used_count(shape.experts.active)
        writer.add_expert_feed_forward_length(shape.experts.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    if shape.mixers:
        _add_mixers(writer, shape.mixers)
    rotated = shape.mixers.rotated if shape.mixers else 1.0
    writer.add_rope_dimension_count(int(shape.head_dim * rotated))
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_vocab_size(shape.vocabulary)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens(shape.vocabulary))
    writer.add_token_types([kinds.CONTROL] + [kinds.NORMAL] * (shape.vocabulary - 1))
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    if shape.rope_scaling:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors(shape), dtype=np.float32))
    for name, numbers in merged(read_bfloat16(folder / "model.safetensors"), shape.model_type).items():
        if numbers.ndim == 1 or "ffn_gate_inp" in name or "conv1d" in name:  # these too are read in float32
            exact = (numbers.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(name, _of_mixers(name, exact) if shape.mixers else exact)
            continue
        if shape.model_type == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = shape.heads if "attn_q" in name else shape.kv_heads
            numbers = numbers[interleaved(len(numbers), heads)]
        raw = np.ascontiguousarray(numbers).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_mixers(writer: gguf.GGUFWriter, mixers: DeltaMixers) -> None:
    writer.add_ssm_conv_kernel(mixers.kernel)
    writer.add_ssm_state_size(mixers.head_dim)
    writer.add_ssm_group_count(mixers.heads)
    writer.add_ssm_time_step_rank(mixers.heads)
    writer.add_ssm_inner_size(mixers.heads * mixers.head_dim)
    writer.add_full_attention_interval(mixers.attention_interval)
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # of time, height and width: equal for text


def _of_mixers(name: str, numbers: Any) -> Any:
    """What llama.cpp multiplies by: decays without their logarithm, and norms with the 1 that Qwen3.5 adds to them."""
    if name.endswith("ssm_a"):
        return -np.exp(numbers)
    if "conv1d" in name:
        return numbers.reshape(len(numbers), -1)
    return numbers + 1 if name.endswith("norm.weight") and "ssm_norm" not in name else numbers


if __name__ == "__main__":
    write(EVERY[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
