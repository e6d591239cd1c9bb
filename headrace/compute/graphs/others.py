"""Compiles the kernels of steps without a graph by running them once before the first request.

Otherwise a request would wait for a second or more for each of them. These are steps with more tokens than the largest
graph, and steps with prompt chunks after long contexts. Here they have few tokens, with a row for each kernel.
"""

from __future__ import annotations

import torch

from headrace.compute.graphs.body import Decoder
from headrace.compute.kv import PagedKV
from headrace.compute.model.largest_step import in_one_block

ROWS = (((1, 20, 100), (600, 20, 100)), ((1, 100), (100, 100)))
"""Tokens of rows, and their contexts: one token with a context that several programs split, a short and a long chunk;
then a token with a short context.
"""


@torch.inference_mode()
def compile_others(decoder: Decoder, kv: PagedKV, max_model_len: int) -> None:
    """Compute each of `ROWS` in block 0 of ``kv``, before any request uses it."""
    for lengths, contexts in ROWS:
        chunks = tuple(min(length, max_model_len) for length in lengths)
        ends = tuple(min(context, max_model_len) for context in contexts)
        decoder.hidden(in_one_block(chunks, ends, kv.block_size, kv.device), kv)
