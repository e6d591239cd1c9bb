"""Writes a checkpoint's folder as one GGUF file in bfloat16; runs where the package ``gguf`` is installed.

``python -m benchmarks.peers.gguf_file SHAPE FOLDER FILE``. It reads safetensors by itself: a JSON head and raw
numbers, of which numpy has no bfloat16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers.gguf_names import interleaved, rope_factors, to_gguf
from benchmarks.peers.shapes import EVERY, Shape
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


def write(shape: Shape, folder: Path, file: Path) -> None:
    """Writes ``file``: matrices in bfloat16 as they are, norms in float32 as llama.cpp wants them."""
    writer = gguf.GGUFWriter(file, shape.model_type)
    writer.add_name(shape.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
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
    for name, numbers in read_bfloat16(folder / "model.safetensors").items():
        if numbers.ndim == 1:
            exact = (numbers.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(to_gguf(name), exact)
            continue
        if shape.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = shape.heads if "q_proj" in name else shape.kv_heads
            numbers = numbers[interleaved(len(numbers), heads)]
        raw = np.ascontiguousarray(numbers).view(np.uint8)
        writer.add_tensor(to_gguf(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(EVERY[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
