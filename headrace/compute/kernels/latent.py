"""Attention over latent keys and values (multi-head latent attention, arXiv:2405.04434), by kernel calls.

A token keeps one latent, and a part of its keys that rotates, for all heads. The matrices that would expand the latent
to keys and values of each head are multiplied with queries and results instead: scores and sums are those of the
expanded form, and a token keeps ``rank + rotary`` features instead of keys and values of all heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headrace.compute.kernels import Pages

if TYPE_CHECKING:
    from headrace.compute.kernels import Kernels


class Latent(NamedTuple):
    """The attention of a layer behind its first product, whose outputs are queries, the latent and the rotating keys.

    With ``query``, a `stack.Linear`, the first product yields narrow queries, which ``query_norm`` and ``query``
    follow. ``norm`` float32 [rank] is that of the latent. ``keys`` [H, plain, rank] and ``values`` [H, value, rank] are
    the matrices that would expand it; ``eps`` is the epsilon of both norms.
    """

    query: Any | None
    query_norm: Tensor | None
    norm: Tensor
    keys: Tensor
    values: Tensor
    eps: float


def attend(
    kernels: Kernels,
    of: Latent,
    packed: Tensor,
    rotation: Tensor,
    slots: Tensor,
    pages: Pages,
    plan: Any,
    scale: float,
) -> Tensor:
    """Write the latents of ``packed`` [T, queries + rank + rotary] to ``pages``, and attend: [T, H * value].

    ``plan`` is that of `Kernels.over_latents`, and ``rotation`` [T, 2, rotary] as in `Kernels.rope_write_kv`.
    """
    tokens, (heads, plain, rank), rotary = len(packed), of.keys.shape, rotation.shape[-1]
    narrow, latent, turning = packed.split_with_sizes((packed.shape[1] - rank - rotary, rank, rotary), 1)
    if of.query is not None and of.query_norm is not None:
        normed = kernels.rms_norm(narrow.contiguous(), of.query_norm, of.eps)
        narrow = kernels.linear(normed, of.query.weight, of.query.bias)
    query = narrow.reshape(tokens, heads, plain + rotary)
    kept = kernels.rms_norm(latent.contiguous(), of.norm, of.eps)
    kept = torch.cat((kept, _turned(turning[:, None], rotation)[:, 0]), 1)
    pages.keys.flatten(0, 1).index_copy_(0, slots, kept[:, None])
    inner = torch.bmm(query[..., :plain].transpose(0, 1), of.keys).transpose(0, 1)
    queries = torch.cat((inner, _turned(query[..., plain:], rotation)), -1)
    out = kernels.over_latents.paged_attention(queries, pages, plan, scale, None)
    sums = out.view(tokens, heads, rank + rotary)[..., :rank]
    expanded = torch.bmm(sums.transpose(0, 1), of.values.transpose(1, 2))
    return expanded.transpose(0, 1).reshape(tokens, -1)


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Heads [T, H, rotary], rotated."""
    cos, sin = rotation[:, 0, None], rotation[:, 1, None]
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1).to(cos.dtype), sin).to(x.dtype)
