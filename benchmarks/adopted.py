"""A transformers model beside its native family: decode steps of both with random weights, in turn, in one process.

``python -m benchmarks.adopted --shape llama-3.2-1b --rounds 40``. Prints the median of each and the ratio of the
medians, for 1 and 16 rows of 128 tokens. Other work on the machine slows both: compare ratios and repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headrace.compute.adopted.loading import load_adopted, read_adoptable
from headrace.compute.batch import Batch
from headrace.compute.kernels import select
from headrace.compute.model.decoder import Decoder, ModelDecoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.weights import dummy_weights
from headrace.compute.quantization.scheme import SCHEMES

CONTEXT, BLOCK = 128, 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "llama-3.2-1b": LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "smollm2-135m": LLAMA
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each model")
    parser.add_argument("--quantization", choices=sorted(SCHEMES))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, dtype = torch.device("cpu"), torch.bfloat16
    kernels = select("cpp", device)
    kernels.threads = options.threads  # type: ignore[attr-defined]
    spec = parse_config(SHAPES[options.shape])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[options.shape]))
        found = read_adoptable(Path(folder))
        scheme = SCHEMES[options.quantization] if options.quantization else None
        adopted = load_adopted(found, kernels, dtype, device, 2048, dummy_seed=0, scheme=scheme).decoder
    weights = dummy_weights(spec, dtype, device, quantize=options.quantization)
    native = Decoder(spec, weights, kernels, 2048)
    print(f"weights: native {native.nbytes / 1e9:.3f} GB, transformers {adopted.nbytes / 1e9:.3f} GB")
    for rows in (1, 16):
        batch = _decode_step(rows)
        kv = PagedKV(adopted.shape, rows * CONTEXT // BLOCK, BLOCK, dtype, device)
        theirs, ours = _in_turn(options.rounds, _step(adopted, batch, kv), _step(native, batch, kv))
        print(
            f"{options.shape}, {rows} rows: native {ours * 1e3:.2f} ms, transformers {theirs * 1e3:.2f} ms,"
            f" ratio {theirs / ours:.3f}",
            flush=True,
        )


def _step(decoder: ModelDecoder, batch: Batch, kv: PagedKV) -> Callable[[], torch.Tensor]:
    return lambda: decoder.logits(decoder.hidden(batch, kv))


def _in_turn(rounds: int, *steps: Callable[[], torch.Tensor]) -> list[float]:
    """The median seconds of each step."""
    times: list[list[float]] = [[] for _ in steps]
    for place in range(rounds + 2):
        for step, taken in zip(steps, times, strict=True):
            begin = time.perf_counter()
            step()
            if place >= 2:
                taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def _decode_step(rows: int) -> Batch:
    blocks = CONTEXT // BLOCK
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    positions = torch.full((rows,), CONTEXT - 1)
    return Batch(
        tokens=torch.full((rows,), 5, dtype=torch.int32),
        positions=positions,
        slot_mapping=(tables[:, -1] * BLOCK + BLOCK - 1).long(),
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=(positions + 1).int(),
        block_tables=tables,
        logits_indices=torch.arange(rows),
        lengths=(1,) * rows,
        contexts=(CONTEXT,) * rows,
        decode_rows=rows,
        block_size=BLOCK,
    )


if __name__ == "__main__":
    main()
