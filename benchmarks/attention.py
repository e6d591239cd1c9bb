"""Paged attention compared with the memory bandwidth: ``python -m benchmarks.attention``.

It measures the attention of one layer, for decode rows and for one prompt, over pages in random order that are in no
CPU cache. The bound of decoding is the size of its keys and values (with their scales) over the bandwidth at which the
same threads sum a large tensor. The bound of the prompt is a matrix product in bfloat16. Times are the minimum of
``--rounds``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from benchmarks.stage import plain_parser, say
from headrace.compute.batch import Batch
from headrace.compute.kernels import HeadShape, Kernels, Pages, select
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV, bytes_per_block
from headrace.compute.model.spec import DecoderSpec

SHAPES = {
    "qwen3-0.6b": HeadShape(heads=16, kv_heads=8, head_dim=128),
    "smollm2-135m": HeadShape(heads=9, kv_heads=3, head_dim=64),
    "llama-3.1-8b": HeadShape(heads=32, kv_heads=8, head_dim=128),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
BLOCK = 16
POOL_BYTES = 1 << 30
PROMPT = 2048
CPU = torch.device("cpu")


def one_layer(shape: HeadShape) -> DecoderSpec:
    """A model of one layer with these heads."""
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": shape.heads * shape.head_dim,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 1 << 17,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    )


def random_pages(spec: DecoderSpec, blocks: int, dtype: torch.dtype) -> Pages:
    """Pages of ``blocks`` blocks with random content."""
    pages = PagedKV(spec.shape, blocks, BLOCK, dtype, CPU).layers[0]
    for part in (pages.keys, pages.values):
        part.random_(-127, 128)
    for scales in (pages.key_scales, pages.value_scales):
        if scales is not None:
            scales.uniform_(0.001, 0.02)
    return pages


def batch_of(length: int, context: int, tables: list[list[int]]) -> Batch:
    """Rows of ``length`` tokens at the end of ``context``, one for each table."""
    rows = len(tables)
    return Batch(
        tokens=torch.zeros(rows * length, dtype=torch.int64),
        positions=torch.arange(context - length, context).repeat(rows),
        slot_mapping=torch.zeros(rows * length, dtype=torch.int64),
        query_starts=torch.arange(0, rows * length + 1, length, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logits_indices=torch.zeros(0, dtype=torch.int64),
        lengths=(length,) * rows,
        contexts=(context,) * rows,
        decode_rows=rows if length == 1 else 0,
        block_size=BLOCK,
    )


def min_seconds(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of ``rounds`` calls."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def decode_seconds(
    kernels: Kernels, shape: HeadShape, pages: Pages, batch: int, context: int, rounds: int
) -> float:
    """Seconds of a call for one batch; calls use all blocks in turn, so that none is in a CPU cache."""
    blocks = list(range(len(pages.keys)))
    random.Random(0).shuffle(blocks)
    needed = -(-context // BLOCK)
    plans: list[Any] = []
    while len(blocks) >= batch * needed and len(plans) < 64:
        tables = [[blocks.pop() for _ in range(needed)] for _ in range(batch)]
        plans.append(kernels.plan_attention(batch_of(1, context, tables), None, torch.bfloat16))
    queries = torch.randn(batch, shape.heads, shape.head_dim).to(torch.bfloat16)

    def all_blocks() -> None:
        for plan in plans:
            kernels.paged_attention(queries, pages, plan, shape.head_dim**-0.5, None)

    return min_seconds(all_blocks, rounds) / len(plans)


def prompt_seconds(kernels: Kernels, shape: HeadShape, pages: Pages, rounds: int) -> float:
    """Seconds of the attention of a whole prompt."""
    batch = batch_of(PROMPT, PROMPT, [list(range(PROMPT // BLOCK))])
    plan = kernels.plan_attention(batch, None, torch.bfloat16)
    queries = torch.randn(PROMPT, shape.heads, shape.head_dim).to(torch.bfloat16)
    return min_seconds(
        lambda: kernels.paged_attention(queries, pages, plan, shape.head_dim**-0.5, None), rounds
    )


def main() -> None:
    """Measure and print."""
    parser = plain_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "smollm2-135m"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 2048, 8192])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "int8"])
    parser.add_argument("--kernels", default="auto", help="cpp or torch")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    kernels = select(args.kernels, CPU)
    large = torch.ones(1 << 27)
    bandwidth = large.nbytes / min_seconds(lambda: large.sum(), 5)
    matrix = torch.randn(2048, 2048).to(torch.bfloat16)
    peak = 2 * 2048**3 / min_seconds(lambda: matrix @ matrix, 3)
    say(
        f"kernels {kernels.name}, {torch.get_num_threads()} threads: memory is read at {bandwidth / 1e9:.1f} GB/s, "
        f"matrices of 2,048 are multiplied at {peak / 1e9:.0f} GFLOP/s"
    )
    say("shape         keys, values  context  batch        ms    GB/s  of bound")
    for name, dtype in product(args.shapes, args.dtypes):
        shape, spec = SHAPES[name], one_layer(SHAPES[name])
        size = bytes_per_block(spec.shape, BLOCK, DTYPES[dtype])
        pages = random_pages(spec, POOL_BYTES // size, DTYPES[dtype])
        for context, batch in product(args.contexts, args.batches):
            read = batch * -(-context // BLOCK) * size
            if read > POOL_BYTES:
                continue
            seconds = decode_seconds(kernels, shape, pages, batch, context, args.rounds)
            say(
                f"{name:13} {dtype:12} {context:8} {batch:6} {seconds * 1e3:9.3f} {read / seconds / 1e9:7.1f} "
                f"{read / seconds / bandwidth:9.0%}"
            )
        seconds = prompt_seconds(kernels, shape, pages, args.rounds)
        rate = 2 * shape.heads * shape.head_dim * PROMPT * PROMPT / seconds
        say(
            f"{name:13} {dtype:12} prompt of {PROMPT:5} {seconds * 1e3:9.3f} ms {rate / 1e9:5.0f} GFLOP/s "
            f"{rate / peak:6.0%}"
        )


if __name__ == "__main__":
    main()
