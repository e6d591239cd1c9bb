"""The reference kernels in plain torch: they define every call, and serve without a compiler.

They run on any device. Attention is planned first: which pages are gathered together. Python work does not grow with
the context, and no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import (
    SMALLEST,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Activation,
    Counts,
    Drafted,
    Greedy,
    HeadNorm,
    HeadShape,
    Pages,
    linear,
)
from headrace.compute.kernels.adapters import LayerChanges, StepChanges
from headrace.compute.kernels.experts import DefinedExperts
from headrace.compute.kernels.latent import DefinedLatents
from headrace.compute.kernels.linear import Prepared
from headrace.compute.kernels.mixers import DefinedMixers
from headrace.compute.kernels.stack import Stack, apply
from headrace.compute.quantization.weight import QuantizedWeight
from headrace.compute.sampling.choice import TokenChoice, choose, counting_of, likeliest
from headrace.compute.sampling.penalties import Allowed, penalize, restrict

# The plan of the reference attention: which pages are gathered together, and which keys each query attends to.
#
# Rows of one token are gathered in groups of similar length, so that padding stays small and calls stay few. Longer
# rows are processed one by one, in tiles of bounded length, which bounds the memory of a mask. A plan is made once per
# step and shared by all layers of the same window.

TILE_TOKENS = 512
GROUP_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens gathered at once: on a CPU as many as fit in its cache, on CUDA few and large operations."""


class DecodeGroup(NamedTuple):
    """Rows of one token whose attention is computed together.

    ``rows`` int64 [B] (None: the first ``size`` rows in order), ``pages`` int64 [B * blocks]. A single row is cut
    exactly by ``span``; several rows are padded to the longest and masked, [B, 1, 1, blocks * block_size].
    ``padding`` int64 [P] are the gathered tokens after their row's context, which belong to other sequences. They are
    overwritten, because a weight of zero does not remove a NaN.
    """

    size: int
    rows: Tensor | None
    pages: Tensor
    span: tuple[int, int] | None
    mask: Tensor | None
    padding: Tensor | None


class PrefillTile(NamedTuple):
    """Packed tokens ``[begin, end)`` of one row, its ``pages``, and the ``span`` of their slots that is attended to.

    ``mask`` [Q, L] is added to the scores; None: the lower triangle of a square.
    """

    begin: int
    end: int
    pages: Tensor
    span: tuple[int, int]
    mask: Tensor | None


class AttentionPlan(NamedTuple):
    """All rows of one step, for layers of one window."""

    groups: tuple[DecodeGroup, ...]
    tiles: tuple[PrefillTile, ...]


def plan(batch: Batch, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """See `Kernels.plan_attention`."""
    groups = tuple(_group(batch, rows, window, dtype) for rows in _similar(batch, window))
    tiles: list[PrefillTile] = []
    begin = batch.decode_rows
    for row in range(batch.decode_rows, len(batch.lengths)):
        tiles += _tiles(batch, row, begin, window, dtype)
        begin += batch.lengths[row]
    return AttentionPlan(groups, tuple(tiles))


def _first_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def _blocks(context: int, window: int | None, block_size: int) -> int:
    """Number of blocks that a row of one token reads."""
    return (context - 1) // block_size + 1 - _first_key(context - 1, window) // block_size


def _seen_end(context: int, window: int | None, block_size: int) -> int:
    """The end of a row's context among its gathered tokens."""
    return context - _first_key(context - 1, window) // block_size * block_size


def _similar(batch: Batch, window: int | None) -> list[list[int]]:
    """Rows of one token, grouped so that none is padded by more than half and a gather stays in cache."""
    blocks = [_blocks(context, window, batch.block_size) for context in batch.contexts[: batch.decode_rows]]
    if not blocks:
        return []
    most = GROUP_TOKENS[batch.tokens.device.type]
    if len(blocks) * max(blocks) * batch.block_size <= most and max(blocks) <= 2 * min(blocks):
        return [list(range(len(blocks)))]
    parts: list[list[int]] = []
    for row in sorted(range(len(blocks)), key=blocks.__getitem__):
        part = parts[-1] if parts else []
        fits = (len(part) + 1) * blocks[row] * batch.block_size <= most
        if part and fits and 2 * blocks[row] <= 3 * blocks[part[0]] + 4:
            part.append(row)
        else:
            parts.append([row])
    return parts


def _group(batch: Batch, rows: list[int], window: int | None, dtype: torch.dtype) -> DecodeGroup:
    size = batch.block_size
    if len(rows) == 1:
        row = rows[0]
        first = _first_key(batch.contexts[row] - 1, window)
        skip = first // size
        pages = batch.block_tables[row, skip : (batch.contexts[row] - 1) // size + 1]
        span = (first - skip * size, batch.contexts[row] - skip * size)
        index = None if row == 0 else torch.arange(row, row + 1, device=pages.device)
        return DecodeGroup(1, index, pages.long(), span, None, None)

    device = batch.block_tables.device
    width = max(_blocks(batch.contexts[row], window, size) for row in rows)
    in_order = rows == list(range(len(rows)))
    index = None if in_order else torch.tensor(rows, device=device)
    context = batch.context_lens[: len(rows)] if index is None else batch.context_lens[index]
    table = batch.block_tables[: len(rows)] if index is None else batch.block_tables[index]
    offsets = torch.arange(width * size, device=device)
    if window is None:
        table = table[:, :width]
        hidden = offsets >= context[:, None]
    else:
        skipped = (context - window).clamp_(min=0) // size
        columns = (skipped[:, None] + offsets[:width]).clamp_(max=table.shape[1] - 1)
        table = table.gather(1, columns.long())
        positions = skipped[:, None] * size + offsets
        hidden = (positions >= context[:, None]) | (positions < context[:, None] - window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    ends = np.array([_seen_end(batch.contexts[row], window, size) for row in rows])
    behind = np.flatnonzero(np.arange(width * size) >= ends[:, None])
    padding = torch.from_numpy(behind).to(device) if behind.size else None
    return DecodeGroup(len(rows), index, table.flatten().long(), None, mask[:, None, None], padding)


def _tiles(batch: Batch, row: int, begin: int, window: int | None, dtype: torch.dtype) -> list[PrefillTile]:
    size = batch.block_size
    length, context = batch.lengths[row], batch.contexts[row]
    start = context - length
    table = batch.block_tables[row]
    joint = batch.joint is not None and bool(batch.joint[row])
    if not joint and start == 0 and (window is None or window >= length):
        pages = table[: (length - 1) // size + 1].long()
        return [PrefillTile(begin, begin + length, pages, (0, length), None)]
    tiles = []
    for offset in range(0, length, TILE_TOKENS):
        count = min(TILE_TOKENS, length - offset)
        position, end = start + offset, context if joint else start + offset + count
        first = _first_key(position, window)
        skip = first // size
        pages = table[skip : (end - 1) // size + 1].long()
        seen = torch.arange(first, end, device=table.device)
        query = torch.arange(position, end, device=table.device)[:, None]
        hidden = seen > (torch.full_like(query, context) if joint else query)
        hidden = hidden if window is None else hidden | (seen <= query - window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=table.device).masked_fill_(hidden, float("-inf"))
        span = (first - skip * size, end - skip * size)
        tiles.append(PrefillTile(begin + offset, begin + offset + count, pages, span, mask))
    return tiles


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""The activations of which the product with the other half is a gate."""


class TorchKernels(DefinedExperts, DefinedLatents, DefinedMixers):
    """The plain-torch backend, with which the others are compared; see `Kernels` for each call."""

    name = "torch"
    isa = ""
    layout = "token, head, feature"
    fp8 = False
    narrow_pages = True
    narrow = False
    coded = False
    penalize = staticmethod(penalize)
    accept = staticmethod(counting_of)

    def __init__(self) -> None:
        self._gathered: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def prepare_linear(self, weight: Tensor | QuantizedWeight, *, consume: bool = False) -> linear.Prepared:
        return linear.prepare(weight)

    prepare_head = prepare_linear

    def prepare_stack(self, stack: Stack) -> Stack:
        return stack

    def step_changes(self, batch: Batch) -> StepChanges:
        return StepChanges(batch)

    def prepare_adapter(self, layers: LayerChanges, stack: Stack) -> LayerChanges:
        return layers

    def run_stack(
        self,
        stack: Stack,
        batch: Batch,
        pages: Sequence[Pages],
    ) -> Tensor:
        return apply(self, stack, batch, pages)

    def prepare_greedy(self, stack: Stack, head: object) -> Greedy | None:
        return None

    def draft(
        self, stack: Stack, head: object, batch: Batch, pages: Sequence[Pages], most: Counts, least: float
    ) -> Drafted | None:
        return None

    def linear(self, x: Tensor, weight: linear.Prepared, bias: Tensor | None = None) -> Tensor:
        return linear.apply(x, weight, bias)

    def logits(self, x: Tensor, weight: Prepared, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).mul_(weight).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return (residual if weight is None else self.rms_norm(residual, weight, eps)), residual

    def rope_write_kv(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotation: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        slots: Tensor,
        pages: Pages,
        head_norm: HeadNorm = "head",
    ) -> Tensor:
        packed = qkv.view(len(qkv), -1, shape.head_dim)
        rotated_heads = shape.heads + shape.kv_heads
        turn, value = packed[:, :rotated_heads], packed[:, rotated_heads:]
        if qk_norm is not None and head_norm == "values":
            value = self.rms_norm(value, qk_norm[rotated_heads:], eps)
        if qk_norm is not None and head_norm in ("head", "values"):
            turn = self.rms_norm(turn, qk_norm[:rotated_heads], eps)
        elif qk_norm is not None and head_norm == "projection":
            pairs = zip(_kinds(turn, shape.heads, 1), _kinds(qk_norm, shape.heads, 0), strict=True)
            turn = torch.cat(
                [self.rms_norm(x.flatten(1), w.flatten(), eps).view(x.shape) for x, w in pairs], 1
            )
        turn = _rotate(turn, rotation)
        if qk_norm is not None and head_norm == "rotated":
            turn = self.rms_norm(turn, qk_norm, eps)
        if shape.kv_heads:
            _write(pages.keys, pages.key_scales, slots, turn[:, shape.heads :])
            _write(pages.values, pages.value_scales, slots, value)
        return turn[:, : shape.heads]

    def plan_attention(self, batch: Batch, window: int | None, dtype: torch.dtype) -> AttentionPlan:
        return plan(batch, window, dtype)

    def paged_attention(
        self,
        queries: Tensor,
        pages: Pages,
        plan: AttentionPlan,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for group in plan.groups:
            self._decode(queries, pages, group, scale, softcap, sinks, out)
        for tile in plan.tiles:
            self._prefill(queries, pages, tile, scale, softcap, sinks, out)
        return out.flatten(1)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if activation == "clamped_swiglu":
            gate, up = gate.float().clamp(max=SWIGLU_LIMIT), up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return (gate * (SWIGLU_ALPHA * gate).sigmoid() * (up + 1)).to(gate_up.dtype)
        return ACTIVATIONS[activation](gate).mul_(up)

    def likeliest(self, logits: Tensor) -> Tensor:
        return likeliest(logits.float())

    def choose(self, logits: Tensor, choice: TokenChoice) -> Tensor:
        return choose(logits, choice)

    def likeliest_outputs(self, x: Tensor, weight: Prepared) -> Tensor:
        return self.likeliest(self.logits(x, weight))

    def restrict(self, logits: Tensor, allowed: Allowed) -> Tensor:
        return restrict(logits, allowed)

    def _decode(
        self,
        queries: Tensor,
        pages: Pages,
        group: DecodeGroup,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """Rows of one token: the query heads that share a key head are the "queries" of one small matrix."""
        size, rows, kv_heads, head_dim = group.size, group.rows, *pages.keys.shape[2:]
        q = queries[:size] if rows is None else queries.index_select(0, rows)
        q = q.reshape(size, kv_heads, -1, head_dim)
        keys, values = self._read(pages, group.pages, queries.dtype)
        k = keys.view(size, -1, kv_heads, head_dim)
        v = values.view(size, -1, kv_heads, head_dim)
        if group.span is not None:
            first, end = group.span
            k, v = k[:, first:end], v[:, first:end]
        if group.padding is not None:
            k.flatten(0, 1).index_fill_(0, group.padding, 0)
            v.flatten(0, 1).index_fill_(0, group.padding, 0)
        own = None if sinks is None else sinks.view(kv_heads, -1, 1)
        y = _attend(q, k.transpose(1, 2), v.transpose(1, 2), group.mask, False, scale, softcap, own)
        if rows is None:
            out[:size] = y.reshape(size, -1, head_dim)
        else:
            out.index_copy_(0, rows, y.reshape(size, -1, head_dim))

    def _prefill(
        self,
        queries: Tensor,
        pages: Pages,
        tile: PrefillTile,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        kv_heads, head_dim = pages.keys.shape[2:]
        first, end = tile.span
        # One "batch" per key head, whose keys are repeated over the query heads by a stride of zero: unlike
        # the grouped form, every backend of torch's attention accepts this one together with a mask.
        q = queries[tile.begin : tile.end].view(-1, kv_heads, queries.shape[1] // kv_heads, head_dim)
        q = q.permute(1, 2, 0, 3)
        keys, values = self._read(pages, tile.pages, queries.dtype)
        k = keys.flatten(0, 1)[first:end].transpose(0, 1)[:, None]
        v = values.flatten(0, 1)[first:end].transpose(0, 1)[:, None]
        k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
        own = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
        y = _attend(q, k, v, tile.mask, tile.mask is None, scale, softcap, own)
        out[tile.begin : tile.end] = y.permute(2, 0, 1, 3).flatten(1, 2)

    def _read(self, pages: Pages, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of the indexed blocks in ``dtype``."""
        keys, values = self._gather(0, pages.keys, index), self._gather(1, pages.values, index)
        if pages.key_scales is None or pages.value_scales is None:
            return keys.to(dtype), values.to(dtype)
        return (
            _dequantized(keys, pages.key_scales, index).to(dtype),
            _dequantized(values, pages.value_scales, index).to(dtype),
        )

    def _gather(self, which: int, pages: Tensor, index: Tensor) -> Tensor:
        """The indexed pages, in memory that is reused from call to call.

        New memory of this size comes from the system page by page, which costs more than the copy.
        """
        key = (which, pages.dtype, pages.device)
        count = len(index) * pages[0].numel()
        memory = self._gathered.get(key)
        if memory is None or memory.numel() < count:
            memory = torch.empty(count, dtype=pages.dtype, device=pages.device)
            self._gathered[key] = memory
        gathered = memory[:count].view(len(index), *pages.shape[1:])
        return torch.index_select(pages, 0, index, out=gathered)


def _kinds(packed: Tensor, heads: int, dim: int) -> tuple[Tensor, ...]:
    """Queries and keys apart."""
    return packed.narrow(dim, 0, heads), packed.narrow(dim, heads, packed.shape[dim] - heads)


def _write(pages: Tensor, scales: Tensor | None, slots: Tensor, heads: Tensor) -> None:
    """Write heads [T, G, D] to their slots of keys or values."""
    if scales is None and pages.is_contiguous():
        pages.flatten(0, 1).index_copy_(0, slots, heads.to(pages.dtype))
        return
    block, offset = slots // pages.shape[1], slots % pages.shape[1]
    if scales is None:
        pages[block, offset] = heads.to(pages.dtype)
        return
    largest = heads.float().abs().amax(-1)
    inverse = torch.where(largest > SMALLEST, 127 / largest, 0)
    pages[block, offset] = (heads.float() * inverse[..., None]).round_().to(torch.int8)
    scales[block, :, offset] = largest / 127


def _dequantized(integers: Tensor, scales: Tensor, index: Tensor) -> Tensor:
    """The values of integers [B, block_size, G, D] of the indexed blocks, in float32."""
    return integers.float() * scales.index_select(0, index).transpose(1, 2)[..., None]


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the first N features of every head: [T, heads, D] with rotation [T, 2, N]."""
    cos, sin = rotation[:, 0, None], rotation[:, 1, None]
    size = rotation.shape[-1]
    part = x if size == x.shape[-1] else x[..., :size]
    turned = (part * cos).addcmul_(part.roll(size // 2, -1).to(cos.dtype), sin).to(x.dtype)
    return turned if part is x else torch.cat((turned, x[..., size:]), -1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of [B, H, Q, D] over [B, H, L, D]; ``causal`` is the lower triangle of a square. ``sinks`` broadcast to
    [B, H, Q, 1].
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    scores: Tensor = (q @ k.transpose(-1, -2)).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    elif causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1).to(q.dtype)
    attended: Tensor = (weights if sinks is None else weights[..., :-1]) @ v
    return attended
