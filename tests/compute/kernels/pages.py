"""Batches and pages for tests of kernels, and what is close enough."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import Pages
from headrace.compute.kernels.reference import TorchKernels
from tests.oracle.harness import pack

CPU = torch.device("cpu")
ORACLE = TorchKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, least: float = 0.0) -> None:
    tolerance = max(least, TOLERANCE[dtype])
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def pages_of(content: Tensor, dtype: torch.dtype) -> Pages:
    """Pages that hold ``content`` [2, num_blocks, block_size, G, D]; 8 bits with scales of any size, in one tensor
    with gaps between the blocks."""
    if dtype.itemsize > 1:
        return Pages(*content.to(dtype))
    _, blocks, block_size, heads, head_dim = content.shape
    apart = torch.zeros(2, blocks, block_size * heads * head_dim + 8, dtype=dtype)
    integers = apart[..., :-8].unflatten(-1, (block_size, heads, head_dim))
    integers.copy_((content * 50).clamp(-127, 127))
    return Pages(*integers, *torch.rand(2, blocks, heads, block_size).div_(25))


def words_of(part: Tensor, values: bool) -> Tensor:
    """Keys or values [num_blocks, block_size, G, D] in the order of words (`Pages` in csrc/operations.h), a view."""
    size = part.shape[1]
    paired = part.dtype in (torch.bfloat16, torch.int8)
    if values:
        return part.unflatten(1, (-1, 2 if paired and size % 2 == 0 else 1)).permute(0, 3, 1, 4, 2)
    return part.unflatten(3, (-1, 2 if paired else 1)).permute(0, 2, 3, 1, 4)


def laid_out(pages: Pages) -> Pages:
    """The same pages as the C++ kernels keep them."""
    parts = []
    for part, values in ((pages.keys, False), (pages.values, True)):
        parts.append(part.clone(memory_format=torch.preserve_format))
        parts[-1].flatten(1).copy_(words_of(part, values).flatten(1))
    return pages._replace(keys=parts[0], values=parts[1])


def forget_the_rest(batch: Batch, pages: Pages) -> None:
    """Whatever lies behind the rows' contexts becomes no number, as a broken sequence may have left it there."""
    written = torch.zeros(pages.keys.shape[:2], dtype=torch.bool)
    for table, context in zip(batch.block_tables.tolist(), batch.contexts, strict=True):
        for position in range(context):
            written[table[position // batch.block_size], position % batch.block_size] = True
    if pages.key_scales is None or pages.value_scales is None:
        pages.keys[~written] = math.nan
        pages.values[~written] = math.nan
    else:
        for scales in (pages.key_scales, pages.value_scales):
            scales.transpose(1, 2)[~written] = math.nan


def rows_of(starts: list[int], lengths: list[int], block_size: int, seed: int) -> tuple[Batch, int]:
    """A batch whose blocks lie in random order, and how many blocks the pages need."""
    needed = [-(-(start + length) // block_size) for start, length in zip(starts, lengths, strict=True)]
    blocks = list(range(sum(needed) + 2))
    random.Random(seed).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    return pack([0] * sum(lengths), starts, lengths, tables, [], block_size, CPU), sum(needed) + 2
