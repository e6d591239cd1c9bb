"""The reference kernels in plain torch: they define every call, and serve without a compiler.

They run on any device. `paging` plans attention; this file has the operations. Python work does not grow with the
context, and no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import (
    SMALLEST,
    Activation,
    Counts,
    Drafted,
    HeadNorm,
    HeadShape,
    Pages,
    linear,
)
from headrace.compute.kernels.paging import AttentionPlan, DecodeGroup, PrefillTile, plan
from headrace.compute.kernels.stack import Stack, apply
from headrace.compute.quantization.weight import QuantizedWeight
from headrace.compute.sampling.allowed import Allowed, restrict
from headrace.compute.sampling.choice import Choice, choose
from headrace.compute.sampling.draw import likeliest
from headrace.compute.sampling.lines import counting_of
from headrace.compute.sampling.penalties import penalize

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""The activations by their names."""


class TorchKernels:
    """The plain-torch backend, with which the others are compared; see `Kernels` for each call."""

    name = "torch"
    isa = ""
    layout = "token, head, feature"
    fp8 = False
    penalize = staticmethod(penalize)
    accept = staticmethod(counting_of)

    def __init__(self) -> None:
        self._gathered: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def prepare_linear(self, weight: Tensor | QuantizedWeight) -> linear.Prepared:
        return linear.prepare(weight)

    def prepare_stack(self, stack: Stack) -> Stack:
        return stack

    def run_stack(
        self,
        stack: Stack,
        batch: Batch,
        pages: Sequence[Pages],
    ) -> Tensor:
        return apply(self, stack, batch, pages)

    def draft(
        self, stack: Stack, head: object, batch: Batch, pages: Sequence[Pages], most: Counts, least: float
    ) -> Drafted | None:
        return None

    def linear(self, x: Tensor, weight: linear.Prepared, bias: Tensor | None = None) -> Tensor:
        return linear.apply(x, weight, bias)

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
        if qk_norm is not None and head_norm == "head":
            turn = self.rms_norm(turn, qk_norm, eps)
        elif qk_norm is not None and head_norm == "projection":
            pairs = zip(_kinds(turn, shape.heads, 1), _kinds(qk_norm, shape.heads, 0), strict=True)
            turn = torch.cat(
                [self.rms_norm(x.flatten(1), w.flatten(), eps).view(x.shape) for x, w in pairs], 1
            )
        turn = _rotate(turn, rotation)
        if qk_norm is not None and head_norm == "rotated":
            turn = self.rms_norm(turn, qk_norm, eps)
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
        """See `Kernels.paged_attention`. ``sinks`` [H] are logits of each head that take weight from all keys
        (arXiv:2309.17453).
        """
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for group in plan.groups:
            self._decode(queries, pages, group, scale, softcap, sinks, out)
        for tile in plan.tiles:
            self._prefill(queries, pages, tile, scale, softcap, sinks, out)
        return out.flatten(1)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def likeliest(self, logits: Tensor) -> Tensor:
        return likeliest(logits.float())

    def choose(self, logits: Tensor, choice: Choice) -> Tensor:
        return choose(logits, choice)

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
        """Keys and values of the indexed blocks as they are, or dequantized to ``dtype``."""
        keys, values = self._gather(0, pages.keys, index), self._gather(1, pages.values, index)
        if pages.key_scales is None or pages.value_scales is None:
            return keys, values
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
    if scales is None:
        if pages.stride(0) == pages.shape[1] * pages.stride(1):
            pages.flatten(0, 1).index_copy_(0, slots, heads.to(pages.dtype))
        else:  # a layer with fewer features than the widest one, whose blocks have a gap behind them
            pages[slots // pages.shape[1], slots % pages.shape[1]] = heads.to(pages.dtype)
        return
    largest = heads.float().abs().amax(-1)
    inverse = torch.where(largest > SMALLEST, 127 / largest, 0)
    block, offset = slots // pages.shape[1], slots % pages.shape[1]
    pages[block, offset] = (heads.float() * inverse[..., None]).round_().to(torch.int8)
    scales[block, :, offset] = largest / 127


def _dequantized(integers: Tensor, scales: Tensor, index: Tensor) -> Tensor:
    """The values of integers [B, block_size, G, D] of the indexed blocks, in float32."""
    return integers * scales.index_select(0, index).transpose(1, 2)[..., None]


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
