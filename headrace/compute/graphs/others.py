"""Steps that no graph computes, run once before the first request: their kernels are compiled when first launched.

A request would wait for a second or more for each of them. These are steps of more tokens than the largest graph, and
those whose prompts stand behind many keys. Here they have few tokens, with a row for each kernel that they launch.
"""

from __future__ import annotations

import torch

from headrace.compute.graphs.body import Decoder
from headrace.compute.kv import PagedKV
from headrace.compute.model.largest_step import in_one_block

ROWS = (((1, 20, 100), (600, 20, 100)), ((1, 100), (100, 100)))
"""Tokens of rows, and their contexts: one token behind keys that several programs share, a short and a long chunk; then
a token behind few keys.
"""


@torch.inference_mode()
def compile_others(decoder: Decoder, kv: PagedKV, max_model_len: int) -> None:
    """Compute each of `ROWS`, in block 0 of ``kv``, which no request may use yet."""
    for lengths, contexts in ROWS:
        chunks = tuple(min(length, max_model_len) for length in lengths)
        ends = tuple(min(context, max_model_len) for context in contexts)
        decoder.hidden(in_one_block(chunks, ends, kv.block_size, kv.device), kv)
