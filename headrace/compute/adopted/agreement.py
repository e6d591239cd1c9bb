"""The check at start that a transformers model computes the same over paged memory as it does alone.

It finds what the structure of a model does not show: a state or a cache of its own, a mask that vanished, layers that
share keys. Two rows are packed into each step and computed in chunks, so that later tokens read earlier ones from the
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.adopted.decoder import AdoptedDecoder
from headrace.compute.batch import Batch
from headrace.compute.checkpoint import ModelError
from headrace.compute.model.kv import PagedKV

LONG, SHORT = 40, 23
"""Tokens of the two rows, or fewer if the model has a shorter context."""

_BLOCK = 8
_CHUNKS = ((13, 9), (2, 1), (1, 1), (7, 8), (1, 1), (19, 8))
"""Tokens that each step computes of the two rows."""

_AHEAD = {3: (3, 5)}
"""Of these, how many of the last ones of a step recurrent states stay before: the next step computes them again."""

TOLERANCE = {torch.float32: 3e-3, torch.float16: 5e-2, torch.bfloat16: 0.15}
"""Most that logits may differ, as a part of their spread: in float32 any of them, in 16 bits the root mean square of
the median token, because rounding may change which experts a token takes."""


class Rows(NamedTuple):
    """Two rows of tokens, and the model's own logits float32 [T, vocab] for each."""

    tokens: tuple[Tensor, Tensor]
    logits: tuple[Tensor, Tensor]


def sample_rows(vocab_size: int, longest: int, excluded: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two rows of tokens that are not ``excluded``, the same each time."""
    generator = torch.Generator().manual_seed(0)
    allowed = torch.tensor(sorted({*range(vocab_size)} - {*excluded}))
    drawn = allowed[torch.randint(len(allowed), (LONG + SHORT,), generator=generator)]
    return drawn[: min(LONG, longest)], drawn[LONG : LONG + min(SHORT, longest)]


@torch.inference_mode()
def check_agreement(decoder: AdoptedDecoder, expected: Rows) -> None:
    """Compute the rows in chunks, and compare the logits with the model's own.

    Raises:
        ModelError: they differ by more than rounding does.
    """
    ours = chunked_logits(decoder, expected.tokens)
    for mine, theirs in zip(ours, expected.logits, strict=True):
        if mine.shape != theirs.shape:
            raise ModelError(f"its logits have shape {list(mine.shape)} instead of {list(theirs.shape)}")
        error = (mine - theirs) / theirs.std().clamp_min(1e-6)
        exact = decoder.dtype == torch.float32
        worst = float(error.abs().max() if exact else error.square().mean(-1).sqrt().median())
        if not worst <= TOLERANCE[decoder.dtype]:
            raise ModelError(
                f"its logits differ from transformers' own by {worst:.2g} of their spread when prompts are computed in"
                " chunks"
            )


def chunked_logits(decoder: AdoptedDecoder, tokens: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The logits float32 [T, vocab] of two rows of tokens, computed in chunks over pages."""
    kv = PagedKV(decoder.shape, 2 * -(-LONG // _BLOCK), _BLOCK, decoder.dtype, decoder.device)
    done, seen = [0, 0], [0, 0]
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step, chunks in enumerate(_CHUNKS):
        lengths = [min(chunk, len(row) - at) for chunk, row, at in zip(chunks, tokens, done, strict=True)]
        order = sorted((row for row in range(2) if lengths[row]), key=lambda row: lengths[row] != 1)
        if not order:
            break
        ahead = (0, 0) if decoder.states is None else _AHEAD.get(step, (0, 0))
        ahead = (min(ahead[0], lengths[0] - 1), min(ahead[1], lengths[1] - 1))
        batch = _batch(
            [tokens[row] for row in order], [(done[row], lengths[row]) for row in order], order, kv
        )
        batch = replace(batch, ahead=np.array([ahead[row] for row in order]))
        logits = decoder.logits(decoder.hidden(batch, kv)).float()
        for row, part in zip(order, torch.split(logits, [lengths[row] for row in order]), strict=True):
            parts[row].append(part[seen[row] - done[row] :])
            seen[row] = max(seen[row], done[row] + lengths[row])
            done[row] += lengths[row] - ahead[row]
    return tuple(torch.cat(row) for row in parts)


def first_step(tokens: Sequence[Tensor], decoder: AdoptedDecoder, longest: int) -> tuple[Batch, PagedKV]:
    """A step of both rows from their first token on, and pages for it.

    Positions of the last row are those before ``longest``: some models scale queries far from the beginning.
    """
    kv = PagedKV(decoder.shape, 2 * -(-LONG // _BLOCK), _BLOCK, decoder.dtype, decoder.device)
    batch = _batch(tokens, [(0, len(row)) for row in tokens], range(len(tokens)), kv)
    last = len(tokens[-1])
    positions = batch.positions.clone()
    positions[-last:] += longest - last
    return replace(batch, positions=positions), kv


def _batch(
    rows: Sequence[Tensor], spans: Sequence[tuple[int, int]], places: Sequence[int], kv: PagedKV
) -> Batch:
    """Tokens [start, start + length) of rows whose blocks are odd or even, by their place, in descending order."""
    device, last = kv.device, kv.num_blocks - 1
    tables = torch.stack([last - place - 2 * torch.arange(kv.num_blocks // 2) for place in places])
    positions = [torch.arange(start, start + length) for start, length in spans]
    slots = [
        table[at // kv.block_size] * kv.block_size + at % kv.block_size
        for table, at in zip(tables, positions, strict=True)
    ]
    lengths = [length for _, length in spans]
    contexts = [start + length for start, length in spans]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Batch(
        tokens=torch.cat([row[at] for row, at in zip(rows, positions, strict=True)]).int().to(device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_starts=ends.int().to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.int().to(device),
        logits_indices=torch.arange(int(ends[-1]), device=device),
        lengths=tuple(lengths),
        contexts=tuple(contexts),
        decode_rows=sum(length == 1 for length in lengths),
        block_size=kv.block_size,
        slots=np.array(places),
    )
