"""Attention over latent keys and values (multi-head latent attention, arXiv:2405.04434), and its definition in torch.

A token keeps one latent, and a part of its keys that rotates, for all heads. For rows of few tokens, the matrices that
would expand the latent to keys and values of each head are multiplied with queries and results instead: scores and
sums are those of the expanded form, and much less memory is read. For rows of many tokens that is more arithmetic than
to expand the latents of their context, so these are expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import SMALLEST, Pages

if TYPE_CHECKING:
    from headrace.compute.kernels import Kernels

MOST_ABSORBED = 16
"""Tokens of a row up to which latents are not expanded."""

CHUNK = 512
"""Keys that are converted to float32 at once: as many as stay in a core's own cache."""

MOST_EXPANDED = 32 << 20
"""Elements of keys and values that latents are expanded to at once: the memory plan does not count them."""


class Latent(NamedTuple):
    """The attention of a layer behind its first product, whose outputs are queries, the latent and the rotating keys.

    With ``query``, a `stack.Linear`, the first product yields narrow queries, which ``query_norm`` and ``query``
    follow. ``norm`` float32 [rank] is that of the latent. ``keys`` [H, plain, rank] and ``values`` [H, value, rank] are
    the matrices that expand it, and ``expansion`` both as `Kernels.prepare_expansion` made them; ``eps`` is the epsilon
    of both norms.
    """

    query: Any | None
    query_norm: Tensor | None
    norm: Tensor
    keys: Tensor
    values: Tensor
    expansion: Any
    eps: float


class FewTokens(NamedTuple):
    """Rows whose latents are not expanded: the tokens of each, their contexts, and int32 [R, blocks] their tables."""

    lengths: Sequence[int]
    contexts: Sequence[int]
    tables: Tensor


class DefinedLatents:
    """Attention over latents of kernels that compute it by its definition."""

    def prepare_expansion(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.prepare_expansion`."""
        return keys, values

    def attend_latents(
        self, query: Tensor, expansion: tuple[Tensor, Tensor], pages: Tensor, rows: FewTokens, scale: float
    ) -> Tensor:
        """See `Kernels.attend_latents`."""
        return absorbed(query, expansion, pages, rows, scale)


def attend(
    kernels: Kernels, of: Latent, packed: Tensor, rotation: Tensor, batch: Batch, pages: Pages, scale: float
) -> Tensor:
    """Write the latents of ``packed`` [T, queries + rank + rotary] to ``pages``, and attend: [T, H * value].

    ``rotation`` [T, 2, rotary] is as in `Kernels.rope_write_kv`.
    """
    tokens, (heads, plain, rank), rotary = len(packed), of.keys.shape, rotation.shape[-1]
    widths = (packed.shape[1] - rank - rotary, rank, rotary)
    narrow, latent, turning = packed.split_with_sizes(widths, 1)
    if of.query is not None and of.query_norm is not None:
        normed = kernels.rms_norm(narrow.contiguous(), of.query_norm, of.eps)
        narrow = kernels.linear(normed, of.query.weight, of.query.bias)
    query = narrow.reshape(tokens, heads, plain + rotary)
    query = torch.cat((query[..., :plain], _turned(query[..., plain:], rotation)), -1)
    kept = kernels.rms_norm(latent.contiguous(), of.norm, of.eps)
    kept = torch.cat((kept, _turned(turning[:, None], rotation)[:, 0]), 1)
    pages.keys.flatten(0, 1).index_copy_(0, batch.slot_mapping, kept[:, None])
    out = packed.new_empty((tokens, heads, of.values.shape[1]))
    parts = query.split_with_sizes(list(batch.lengths))
    few = [row for row, length in enumerate(batch.lengths) if length <= MOST_ABSORBED]
    if few:
        contexts = [batch.contexts[row] for row in few]
        blocks = -(-max(contexts) // batch.block_size)
        rows = FewTokens([batch.lengths[row] for row in few], contexts, batch.block_tables[few, :blocks])
        queries = query if len(few) == len(parts) else torch.cat([parts[row] for row in few])
        means = kernels.attend_latents(queries, of.expansion, pages.keys, rows, scale)
        if len(few) == len(parts):
            return means.flatten(1)
        places = torch.arange(tokens, device=out.device).split_with_sizes(list(batch.lengths))
        out.index_copy_(0, torch.cat([places[row] for row in few]), means)
    for row, part, each in zip(
        range(len(parts)), parts, out.split_with_sizes(list(batch.lengths)), strict=True
    ):
        if len(part) > MOST_ABSORBED:
            context = batch.contexts[row]
            table = batch.block_tables[row, : -(-context // batch.block_size)].long()
            each.copy_(_expanded(of, part, pages.keys, table, context, scale))
    return out.flatten(1)


def absorbed(
    query: Tensor, expansion: tuple[Tensor, Tensor], pages: Tensor, rows: FewTokens, scale: float
) -> Tensor:
    """Attention [T, H, value] of rows of few tokens: the definition of `Kernels.attend_latents`."""
    parts = zip(query.split_with_sizes(list(rows.lengths)), rows.tables.long(), rows.contexts, strict=True)
    return torch.cat(
        [_absorbed(*expansion, part, pages, table, context, scale) for part, table, context in parts]
    )


def _absorbed(
    expand_keys: Tensor,
    expand_values: Tensor,
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    context: int,
    scale: float,
) -> Tensor:
    """Attention [n, H, value] of a row's last tokens, whose queries are ``query`` [n, H, plain + rotary]."""
    length, (heads, plain, rank), size = len(query), expand_keys.shape, pages.shape[1]
    inner = torch.bmm(query[..., :plain].transpose(0, 1), expand_keys).transpose(0, 1)
    queries = torch.cat((inner, query[..., plain:]), -1).flatten(0, 1).float().mul_(scale)
    peaks = queries.new_full((len(queries), 1), float("-inf"))
    totals, sums = torch.zeros_like(peaks), queries.new_zeros((len(queries), rank))
    positions = torch.arange(context - length, context, device=query.device).repeat_interleave(heads)[:, None]
    step = max(1, CHUNK // size)
    # Memory for all chunks: new one would come from the system page by page, which costs more than the copies.
    gathered = pages.new_empty((step, *pages.shape[1:]))
    wide = queries.new_empty((step * size, pages.shape[-1]))
    for first in range(0, context, step * size):
        blocks = table[first // size : first // size + step]
        torch.index_select(pages, 0, blocks, out=gathered[: len(blocks)])
        wide[: len(blocks) * size].copy_(gathered[: len(blocks)].flatten(0, 2))
        keys = wide[: context - first]
        scores = queries @ keys.T
        if length > 1 and first + len(keys) > context - length + 1:
            seen = torch.arange(first, first + len(keys), device=query.device)
            scores.masked_fill_(seen > positions, float("-inf"))
        before, peaks = peaks, torch.maximum(peaks, scores.amax(1, keepdim=True))
        shrink = (before - peaks).exp_()
        # Without the smallest weights: products with denormal numbers are slow.
        weights = F.threshold(scores.sub_(peaks).exp_(), SMALLEST, 0.0, inplace=True)
        totals = totals.mul_(shrink).add_(weights.sum(1, keepdim=True))
        sums = sums.mul_(shrink).addmm_(weights, keys[:, :rank])
    mean = (sums / totals).to(query.dtype).view(length, heads, rank)
    return torch.bmm(mean.transpose(0, 1), expand_values.transpose(1, 2)).transpose(0, 1)


def _expanded(of: Latent, query: Tensor, pages: Tensor, table: Tensor, context: int, scale: float) -> Tensor:
    """`_absorbed`, with keys and values of each head: of some heads at once, because contexts may be long."""
    length, heads, rank = len(query), len(of.keys), of.keys.shape[-1]
    size, width = query.shape[-1], of.values.shape[1]
    kept = pages.index_select(0, table).flatten(0, 1)[:context, 0]
    latents, turned = kept[:, :rank], kept[:, rank:]
    mask = None
    if length < context:
        seen = torch.arange(context, device=query.device)
        mask = seen <= torch.arange(context - length, context, device=query.device)[:, None]
    out = query.new_empty((length, heads, width))
    together = max(1, MOST_EXPANDED // (context * (size + max(size, width))))
    for first in range(0, heads, together):
        part = slice(first, first + together)
        keys = torch.matmul(latents, of.keys[part].transpose(1, 2))
        keys = torch.cat((keys, turned.expand(len(keys), -1, -1)), -1)
        values = torch.matmul(latents, of.values[part].transpose(1, 2))
        if width < size:  # torch's fused attention takes heads of one size
            values = F.pad(values, (0, size - width))
        y = F.scaled_dot_product_attention(
            query[:, part].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        out[:, part] = y[0, ..., :width].transpose(0, 1)
    return out


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Heads [T, H, rotary], rotated."""
    cos, sin = rotation[:, 0, None], rotation[:, 1, None]
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1).to(cos.dtype), sin).to(x.dtype)
