"""Copying, written into a decoder's first two layers before it learns.

Left to itself, a decoder sees millions of tokens before it copies: one head must learn to look at the token before,
and another one, of a later layer, to look for what stood after the same token; neither is of use without the other.
(Olsson et al., "In-context Learning and Induction Heads", 2022, describe the circuit; here it is where we begin.)
"""

from __future__ import annotations

import torch

from training.model import Decoder

STEADY = 4.0  # a coordinate that all embeddings share, in standard deviations of the others
NEAR = 8  # the fastest frequencies; together they tell the token before from its neighbours
SHARPNESS = 6.0  # of the scores by which a head looks back, per frequency
MATCH = 2.0  # length of the rows by which two tokens are compared
LOUDNESS = 4.0  # of a token that is repeated, in embeddings


@torch.no_grad()
def lay_induction(model: Decoder, seed: int) -> None:
    """Write an induction circuit into a fresh decoder of two or more layers.

    A head of layer 0 looks one token back, by the rotation of a coordinate that all embeddings share, and hands on
    what it saw. Heads of layer 1 compare that with the present token, in frequencies that are too slow to tell
    distances, and repeat the token which they find. Everything stays free to change in training.
    """
    s = model.shape
    width, half, groups = s.head_dim, s.head_dim // 2, s.heads // s.kv_heads
    draw = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(s.hidden - 1, s.hidden - 1, generator=draw))[0]
    basis = torch.cat(
        (torch.zeros(s.hidden - 1, 1), basis), 1
    )  # orthonormal rows that leave the steady one alone
    repeated = torch.linalg.qr(torch.randn(s.hidden, s.hidden, generator=draw))[0]
    seen, told = basis[:width], basis[width : 2 * width]
    embedding = model.model.embed_tokens.weight
    scale = embedding.std().item()
    embedding[:, 0] = STEADY * scale

    back, look = (layer.self_attn for layer in list(model.model.layers)[:2])
    angles = s.rope_theta ** -(torch.arange(NEAR) / half)
    length = (SHARPNESS * width**0.5) ** 0.5 / STEADY
    back.q_proj.weight[:width] = 0.0
    back.k_proj.weight[:width] = 0.0
    back.k_proj.weight[:NEAR, 0] = length
    back.q_proj.weight[:NEAR, 0] = length * angles.cos()  # the key's direction, turned back by one position
    back.q_proj.weight[half : half + NEAR, 0] = -length * angles.sin()
    back.v_proj.weight[:width] = seen
    back.o_proj.weight[:, :width] = scale * told.T

    slow = half // 2  # frequencies that hold still over some hundred tokens
    for head in range(s.kv_heads):
        query, key = head * groups * width, head * width
        look.q_proj.weight[query : query + width] = 0.0
        look.k_proj.weight[key : key + width] = 0.0
        for part in range(2):  # the two halves of a rotated pair
            rows = slice((2 * head + part) * slow, (2 * head + part + 1) * slow)
            first = part * half + half - slow
            look.q_proj.weight[query + first : query + first + slow] = MATCH * seen[rows]
            look.k_proj.weight[key + first : key + first + slow] = MATCH * told[rows]
        look.v_proj.weight[key : key + width] = repeated[key : key + width]
        look.o_proj.weight[:, query : query + width] = LOUDNESS * scale * repeated[key : key + width].T
