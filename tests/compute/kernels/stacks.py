"""Small stacks of layers with random weights, their pages, and batches for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.compute.batch import Batch, Features
from headrace.compute.kernels import HeadNorm, HeadShape, Pages
from headrace.compute.kernels.experts import Mixture, Mlp, Router, Routing
from headrace.compute.kernels.per_layer import InputGate, PerLayerInputs
from headrace.compute.kernels.stack import Layer, Linear, Stack
from tests.compute.kernels.weights import quantized_weight
from tests.oracle.harness import pack

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS = 48, 40, HeadShape(4, 2, 16)
BLOCKS, BLOCK = 12, 4
ROTARY = (16, 8)
VOCAB, POSITIONS = 24, 12


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(kernels: Any, outputs: int, inputs: int, dtype: torch.dtype, kind: str, biased: bool) -> Linear:
    """``kind``: "plain" in ``dtype``, "narrow" with elements that bfloat16 holds too, or quantized."""
    plain = torch.bfloat16 if kind == "narrow" else dtype
    bits: dict[str, tuple[Literal[4, 8], Literal[8, 16]]] = {"W8A8": (8, 8), "W4A16": (4, 16), "fp8": (8, 8)}
    weight = (
        quantized_weight(outputs, inputs, 1, *bits[kind], zeros=kind == "W4A16", fp8=kind == "fp8")
        if kind in bits
        else (random(outputs, inputs, seed=outputs) / inputs**0.5).to(plain).to(dtype)
    )
    bias = random(outputs, seed=1).to(dtype) if biased else None
    return Linear(kernels.prepare_linear(weight), bias)


def make(
    kernels: Any,
    dtype: torch.dtype,
    kind: str = "plain",
    rich: bool = False,
    heads: HeadShape = HEADS,
    inner: int = INNER,
    positions: int = POSITIONS,
    head_norm: HeadNorm = "head",
    before: bool = True,
) -> Stack:
    """Three layers; ``rich`` ones have all that a family may have beyond a Llama's. Without ``before``, norms only
    follow attention and MLP, and the last layer.
    """

    def norm(size: int = HIDDEN, seed: int = 3) -> Tensor:
        return random(size, seed=seed).abs() + 0.5

    def layer(number: int) -> Layer:
        kv = heads.head_dim * heads.kv_heads
        q = heads.head_dim * heads.heads
        biased = rich and number != 1
        return Layer(
            qkv=linear(kernels, q + 2 * kv, HIDDEN, dtype, kind, biased),
            output=linear(kernels, HIDDEN, q, dtype, kind, biased),
            feed=Mlp(
                linear(kernels, 2 * inner, HIDDEN, dtype, kind, biased),
                linear(kernels, HIDDEN, inner, dtype, kind, biased),
            ),
            qk_norm=norm(heads.heads + heads.kv_heads)[:, None].repeat(1, heads.head_dim) if rich else None,
            post_attention_norm=norm() if rich else None,
            mlp_norm=norm(seed=4 + number) if before else None,
            post_mlp_norm=norm(seed=5) if rich and number else None,
            following_norm=norm(seed=6 + number) if before or number == 2 else None,
            window=3 if rich and number == 1 else None,
            rope=int(rich and number == 1),
            sinks=random(heads.heads, seed=8) if rich and number else None,
        )

    torch.manual_seed(0)
    layers = tuple(layer(number) for number in range(3))
    softcap = 20.0 if rich else None
    embedding, scale = random(VOCAB, HIDDEN, seed=9).to(dtype), 2.75 if rich else 1.0
    activation = "gelu_tanh" if rich else "silu"
    ropes = rotations(positions)
    first = norm() if before else None
    of = (heads, activation, 1e-5, 0.25, softcap, head_norm)
    return Stack(embedding, scale, ropes, layers, first, dtype, *of)


def pages_for(
    dtype: torch.dtype, heads: HeadShape = HEADS, blocks: int = BLOCKS, block: int = BLOCK
) -> tuple[Pages, ...]:
    def part() -> Tensor:
        return torch.zeros(blocks, block, heads.kv_heads, heads.head_dim, dtype=dtype)

    def scales() -> Tensor | None:
        return torch.zeros(blocks, heads.kv_heads, block) if dtype == torch.int8 else None

    return tuple(Pages(part(), part(), scales(), scales()) for _ in range(3))


def rotations(positions: int) -> tuple[Tensor, ...]:
    turned = []
    for rotary in ROTARY:
        angles = torch.arange(positions)[:, None] / (1 + torch.arange(rotary // 2))
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        sin[:, : rotary // 2] *= -1
        turned.append(torch.stack([cos, sin], 1))
    return tuple(turned)


PROMPTS = pack(
    [*range(9, 17)], [0, 0], [5, 3], [[1, 2, 7], [4, 5, 6]], [], BLOCK, CPU
)  # nothing wanted: a chunk in the middle
MIXED = pack([*range(8)], [5, 3, 0], [1, 3, 4], [[1, 2, 7], [4, 5, 6], [9]], [0, 3, 6], BLOCK, CPU)
DECODING = pack([*range(2)], [6, 6], [1, 1], [[1, 2, 7], [4, 5, 6]], [0, 1], BLOCK, CPU)


def with_experts(kernels: Any, stack: Stack, kind: str = "plain") -> Stack:
    """The first and the last layer have experts; a shared one computes all tokens."""

    def mixture(seed: int) -> Mixture:
        each = [
            Mlp(
                linear(kernels, 2 * width, HIDDEN, stack.dtype, kind, biased=False),
                linear(kernels, HIDDEN, width, stack.dtype, kind, biased=False),
            )
            for width in (8, 16, 24, 32, 40, 56)
        ]
        router = Router(random(6, HIDDEN, seed=seed).to(stack.dtype), None, Routing(5, 2, shared="gated"))
        return Mixture(kernels.prepare_router(router), kernels.prepare_experts(each, stack.dtype))

    first, *middle, last = stack.layers
    return replace(stack, layers=(replace(first, feed=mixture(1)), *middle, replace(last, feed=mixture(2))))


NARROW, WIDE = HeadShape(4, 2, 8), HeadShape(4, 1, 16)


def of_many_shapes(kernels: Any, dtype: torch.dtype, kind: str = "plain", scale: float = 1.0) -> Stack:
    """Four layers as Gemma 4 has them: heads of two shapes, layers that share, inputs of each layer, and a scale."""
    width, turning = 6, rotations(POSITIONS)

    def layer(number: int, heads: HeadShape, shares: bool) -> Layer:
        q, kv = heads.heads * heads.head_dim, 0 if shares else heads.kv_heads * heads.head_dim
        inner = INNER * (2 if shares else 1)
        normed = heads.heads + (0 if shares else 2 * heads.kv_heads)
        return Layer(
            qkv=linear(kernels, q + 2 * kv, HIDDEN, dtype, kind, biased=False),
            output=linear(kernels, HIDDEN, q, dtype, kind, biased=False),
            feed=Mlp(
                linear(kernels, 2 * inner, HIDDEN, dtype, kind, biased=False),
                linear(kernels, HIDDEN, inner, dtype, kind, biased=False),
            ),
            qk_norm=random(normed, heads.head_dim, seed=number).abs() + 0.5,
            post_attention_norm=random(HIDDEN, seed=1).abs() + 0.5,
            mlp_norm=random(HIDDEN, seed=2).abs() + 0.5,
            post_mlp_norm=random(HIDDEN, seed=3).abs() + 0.5,
            following_norm=random(HIDDEN, seed=4).abs() + 0.5,
            window=3 if heads is NARROW else None,
            rope=int(heads is NARROW),
            heads=heads,
            shares=shares,
            input_gate=InputGate(
                linear(kernels, width, HIDDEN, dtype, "plain", biased=False),
                linear(kernels, HIDDEN, width, dtype, "plain", biased=False),
                random(HIDDEN, seed=5).abs() + 0.5,
            ),
            scale=scale,
        )

    shapes = ((NARROW, False), (WIDE, False), (NARROW, True), (WIDE, True))
    layers = tuple(layer(number, *shape) for number, shape in enumerate(shapes))
    projection = linear(kernels, 4 * width, HIDDEN, dtype, "plain", biased=False)
    beside = PerLayerInputs(
        random(VOCAB, 4 * width, seed=8).to(dtype), projection, random(width, seed=7).abs()
    )
    embedding, first = random(VOCAB, HIDDEN, seed=9).to(dtype), random(HIDDEN, seed=6).abs()
    of = (NARROW, "gelu_tanh", 1e-5, 1.0, None, "values")
    return Stack(embedding, 2.75, turning, layers, first, dtype, *of, per_layer=beside)


def pages_of_many_shapes(dtype: torch.dtype) -> tuple[Pages, ...]:
    narrow, wide = pages_for(dtype, NARROW)[0], pages_for(dtype, WIDE)[0]
    return narrow, wide, narrow, wide


AXES = tuple(torch.arange(size) % 3 for size in ROTARY)


def with_images(batch: Batch, dtype: torch.dtype, layers: int = 2) -> Batch:
    """The batch with rows of images at some places, behind layers too, and with positions of three kinds."""
    places, count = torch.tensor([0, 2, 3, len(batch.tokens) - 1]), 4
    rows = random(1 + layers, count, HIDDEN, seed=11).to(dtype)
    axes = torch.stack([batch.positions, batch.positions.flip(0), 3 + batch.positions // 2])
    return replace(batch, features=Features(places, rows[0], rows[1:]), axes=axes, kept={})


def with_joint_rows(stack: Stack, batch: Batch) -> tuple[Stack, Batch]:
    """Only the middle layer knows that the longer rows are joint."""
    layers = tuple(replace(layer, joint=number == 1) for number, layer in enumerate(stack.layers))
    joint = torch.tensor([length > 1 for length in batch.lengths], dtype=torch.uint8)
    return replace(stack, layers=layers), replace(batch, joint=joint, kept={})
