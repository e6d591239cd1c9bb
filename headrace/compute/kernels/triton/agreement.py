"""Whether the kernels give on this device what torch's operations give: asked at start, before `auto` uses them.

Each check is a small call with fixed inputs, which is run with both backends. The shapes are few, but the type and the
heads are those of the model, because Triton compiles other code for these. It does not replace the tests: it finds a
compiler, a driver or a device that the kernels do not work with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import AdapterTokens, Batch
from headrace.compute.kernels import HeadNorm, HeadShape, Kernels, Pages
from headrace.compute.kernels.adapters import OF_EXPERTS, Change, Part, of_expert
from headrace.compute.kernels.experts import Mlp, Router, Routing
from headrace.compute.kernels.mixers import (
    Convolution,
    GatedDelta,
    Mixer,
    ShortConvolution,
    StateSpace,
    StepRows,
)
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.kernels.stack import Layer, Linear, Stack
from headrace.compute.kernels.triton.quantized import MOST_FP8_ROWS, MOST_INTEGER_ROWS, MOST_ROWS
from headrace.compute.quantization.weight import FP8, QuantizedWeight, pack_halves
from headrace.compute.sampling.choice import TokenChoice
from headrace.compute.sampling.penalties import IN_PROMPT, Allowed, Penalty
from headrace.compute.shared_keys import MOST_GROUPS, RowGroups, SharedKeys

TOLERANCE = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Differences that are rounding, as parts of a result's largest magnitude; torch may use TF32 for float32."""

_BLOCK, _WIDTH, _VOCAB = 16, 128, 600
_CONTEXTS, _LENGTHS = (60, 25, 50, 80), (1, 5, 20, 70)

Call = Callable[[Any], Sequence[Tensor]]


def disagreement(kernels: Kernels, dtype: torch.dtype, heads: HeadShape, device: torch.device) -> str:
    """Which kernels fail, or give something else than torch, in calculations with ``dtype``; empty if none does.

    Of ``heads``, so many are taken as share one of keys, and the same again.
    """
    exact, wrong = TorchKernels(), []
    few = HeadShape(2 * (heads.heads // heads.kv_heads), 2, heads.head_dim)
    draw = _Draw(device, dtype)
    for name, call in _checks(draw, dtype, few, kernels.fp8):
        try:
            found = call(kernels)
            if not all(map(_close, found, call(exact))):
                wrong.append(f"{name}: another result than torch's")
        except Exception as error:  # a compiler or driver may raise anything
            wrong.append(f"{name}: {type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}")
    return "; ".join(wrong)


def _close(ours: Tensor, exact: Tensor) -> bool:
    """Whether two results differ by rounding at most; integers must be equal."""
    if ours.shape != exact.shape or ours.dtype != exact.dtype:
        return False
    if not ours.is_floating_point():
        return torch.equal(ours, exact)
    difference = (ours.float() - exact.float()).abs().max()
    most = exact.float().abs().max().clamp(min=1e-6)
    return bool(difference <= TOLERANCE[ours.dtype] * most)  # false for NaN too


def _rounded(result: Tensor) -> Tensor:
    """A result behind numbers in bytes, which may be rounded to the next byte: compared as coarsely as bfloat16."""
    return result.to(torch.bfloat16)


class _Draw:
    """Random inputs, the same ones each time, without touching torch's own generator."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator)
        return drawn.to(self.device, dtype or self._dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self.device, dtype)


def _checks(draw: _Draw, dtype: torch.dtype, heads: HeadShape, fp8: bool) -> Iterator[tuple[str, Call]]:
    yield from _attention(draw, heads)
    yield from _rows(draw, heads)
    yield from _products(draw, fp8)
    yield from _experts(draw)
    yield from _mixers(draw)
    yield "adapters", _adapters(draw)
    yield "adapters of experts", _adapters_of_experts(draw)
    yield from _sampling(draw)
    for kind in (None, "W8A8"):
        yield f"all layers{' of W8A8' if kind else ''}", _layers(draw, dtype, heads, kind)


def _batch(draw: _Draw, contexts: Sequence[int], lengths: Sequence[int]) -> Batch:
    """Rows with blocks of their own; the first row of one token decodes."""

    def tensor(values: Any, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=kind, device=draw.device)

    width = -(-max(contexts) // _BLOCK)
    tables = np.random.default_rng(0).permutation(len(lengths) * width).reshape(len(lengths), width)
    rows = [
        (row, at)
        for row, (context, length) in enumerate(zip(contexts, lengths, strict=True))
        for at in range(context - length, context)
    ]
    slots = [int(tables[row, at // _BLOCK]) * _BLOCK + at % _BLOCK for row, at in rows]
    return Batch(
        tokens=draw.integers(0, _VOCAB, len(rows), dtype=torch.int32),
        positions=tensor([at for _, at in rows]),
        slot_mapping=tensor(slots),
        query_starts=tensor([0, *accumulate(lengths)], torch.int32),
        context_lens=tensor(contexts, torch.int32),
        block_tables=tensor(tables, torch.int32),
        logits_indices=tensor([*range(len(rows))]),
        lengths=tuple(lengths),
        contexts=tuple(contexts),
        decode_rows=next((row for row, length in enumerate(lengths) if length != 1), len(lengths)),
        block_size=_BLOCK,
    )


def _pages(draw: _Draw, batch: Batch, heads: HeadShape, integers: bool = False) -> Pages:
    shape = (batch.block_tables.numel(), _BLOCK, heads.kv_heads, heads.head_dim)
    if not integers:
        return Pages(draw.numbers(*shape), draw.numbers(*shape))
    parts = [draw.integers(-127, 128, *shape, dtype=torch.int8) for _ in range(2)]
    scales = (shape[0], heads.kv_heads, _BLOCK)
    keys, values = parts
    factors = [draw.numbers(*scales, dtype=torch.float32).abs() / 100 for _ in range(2)]
    return Pages(keys, values, factors[0], factors[1])


def _attention(draw: _Draw, heads: HeadShape) -> Iterator[tuple[str, Call]]:
    """Decoding, drafts, a chunk and a prompt; then rows that share a prefix."""
    mixed = _batch(draw, _CONTEXTS, _LENGTHS)
    decoding = _batch(draw, (530, 290, 300, 17, 400), (1, 1, 1, 1, 1))
    decoding.block_tables[1:3, :16] = decoding.block_tables[0, :16]
    groups = RowGroups(np.array([256, 256, 256, 0, 0]), np.array([0, 0, 0, MOST_GROUPS - 1, MOST_GROUPS - 1]))
    own = np.arange(5)
    keys = (groups.keys.astype(np.int32), *groups.arrange(own, own))
    shared = replace(decoding, shared=SharedKeys(*(torch.from_numpy(each).to(draw.device) for each in keys)))

    def call(
        batch: Batch, pages: Pages, window: int | None, softcap: float | None, sinks: Tensor | None = None
    ) -> Call:
        queries = draw.numbers(len(batch.tokens), heads.heads, heads.head_dim)
        scale = heads.head_dim**-0.5
        return lambda kernels: [
            kernels.paged_attention(
                queries, pages, kernels.plan_attention(batch, window, queries.dtype), scale, softcap, sinks
            )
        ]

    yield "attention", call(mixed, _pages(draw, mixed, heads), None, None)
    yield "attention with a window", call(mixed, _pages(draw, mixed, heads), 30, 30.0)
    yield "attention over int8 keys", call(mixed, _pages(draw, mixed, heads, True), None, None)
    yield "attention when decoding", call(decoding, _pages(draw, decoding, heads), None, None)
    yield "attention behind a shared prefix", call(shared, _pages(draw, shared, heads), None, None)
    sinks = draw.numbers(heads.heads, dtype=torch.float32)
    yield "attention with sinks", call(mixed, _pages(draw, mixed, heads), 30, None, sinks)
    yield (
        "attention with sinks when decoding",
        call(decoding, _pages(draw, decoding, heads), None, None, sinks),
    )


def _rows(draw: _Draw, heads: HeadShape) -> Iterator[tuple[str, Call]]:
    """Norms, the rotation with the write of keys and values, activations."""
    x, residual, weight = draw.numbers(9, _WIDTH), draw.numbers(9, _WIDTH), draw.numbers(_WIDTH).float()
    yield "norm", lambda kernels: [kernels.rms_norm(x, weight, 1e-5)]
    yield "norm of a sum", lambda kernels: kernels.add_rms_norm(x, residual.clone(), weight, 1e-5)
    yield "sum without a norm", lambda kernels: kernels.add_rms_norm(x, residual.clone(), None, 1e-5)
    each, kv_heads, head_dim = heads
    qkv = draw.numbers(9, (each + 2 * kv_heads) * head_dim)
    rotation, all_norms = (
        draw.numbers(9, 2, head_dim).float(),
        draw.numbers(len(qkv[0]) // head_dim, head_dim),
    )
    slots = torch.arange(9, device=draw.device) * 3

    def rotate(integers: bool, head_norm: HeadNorm = "head") -> Call:
        def call(kernels: Kernels) -> Sequence[Tensor]:
            pages = _empty_pages(draw.device, qkv.dtype, heads, integers)
            norms = all_norms.float()[: None if head_norm == "values" else each + kv_heads]
            queries = kernels.rope_write_kv(
                qkv.clone(), heads, rotation, norms, 1e-5, slots, pages, head_norm
            )
            if pages.key_scales is None or pages.value_scales is None:
                return queries, pages.keys, pages.values
            scales = (pages.key_scales, pages.value_scales)
            wide = (
                part.float() * scale.transpose(1, 2)[..., None]
                for part, scale in zip(pages[:2], scales, strict=True)
            )
            return queries, *map(_rounded, wide)

        return call

    yield "rotation", rotate(False)
    yield "rotation with int8 keys", rotate(True)
    yield "rotation after a norm of all heads", rotate(False, "projection")
    yield "rotation before a norm", rotate(False, "rotated")
    yield "rotation after a norm of values too", rotate(False, "values")
    gate_up = draw.numbers(9, 2 * _WIDTH)
    yield (
        "activation",
        lambda kernels: [
            kernels.gated_activation(gate_up.clone(), "silu"),
            kernels.gated_activation(gate_up.clone(), "gelu_tanh"),
            kernels.gated_activation(8 * gate_up, "clamped_swiglu"),
        ],
    )


def _empty_pages(device: torch.device, dtype: torch.dtype, heads: HeadShape, integers: bool) -> Pages:
    shape = (2, 2, _BLOCK, heads.kv_heads, heads.head_dim)
    if not integers:
        return Pages(*torch.zeros(shape, dtype=dtype, device=device))
    scales = torch.zeros(2, 2, heads.kv_heads, _BLOCK, device=device)
    return Pages(*torch.zeros(shape, dtype=torch.int8, device=device), *scales)


def _weight(draw: _Draw, kind: str) -> QuantizedWeight:
    """A weight [outputs, inputs] of ``_WIDTH`` each, in groups of 64 if its values have 4 bits."""
    bits, activation_bits = int(kind[1]), int(kind[3:].split()[0])
    groups = _WIDTH // 64 if bits == 4 else 1
    scales = (draw.numbers(_WIDTH, groups, dtype=torch.float32).abs() + 1) / (1 << (bits + 3))
    points = None
    if "fp8" in kind:
        values = draw.numbers(_WIDTH, _WIDTH, dtype=torch.float32).to(FP8)
    else:
        limit = 1 << (bits - 1)
        values = draw.integers(-limit, limit, _WIDTH, _WIDTH, dtype=torch.int8)
    if bits == 4:
        values, points = pack_halves(values), draw.integers(-2, 3, _WIDTH, groups, dtype=torch.int8)
    weight = QuantizedWeight(
        values, scales, points, None, 4 if bits == 4 else 8, 8 if activation_bits == 8 else 16
    )
    return replace(weight, zeros=None, minima=-7.5 * scales) if "minima" in kind else weight


def _products(draw: _Draw, fp8: bool) -> Iterator[tuple[str, Call]]:
    """Each kind of quantized weight, with few rows and with more of them than the kernel takes."""
    bias = draw.numbers(_WIDTH)
    most = {"W4A16": MOST_ROWS, "W8A16": MOST_ROWS, "W4A8": MOST_ROWS, "W8A8": MOST_INTEGER_ROWS}
    most["W4A16 with minima"] = MOST_ROWS
    for kind, rows in (most | ({"W8A8 fp8": MOST_FP8_ROWS} if fp8 else {})).items():
        weight, few, many = _weight(draw, kind), draw.numbers(3, _WIDTH), draw.numbers(rows + 1, _WIDTH)

        def call(kernels: Kernels, weight: Any = weight, given: Any = (few, many)) -> Sequence[Tensor]:
            prepared = kernels.prepare_linear(weight)
            products = [kernels.linear(x, prepared, bias) for x in given]
            return products if weight.activation_bits == 16 else [*map(_rounded, products)]

        yield f"product {kind}", call


def _experts(draw: _Draw) -> Iterator[tuple[str, Call]]:
    """A router, and experts of some weights for one token and for many."""
    routing = Routing(12, 3, "sigmoid", groups=4, kept_groups=2, shared="gated")
    x, points = draw.numbers(20, _WIDTH), draw.numbers(routing.outputs, dtype=torch.float32)
    weight = draw.numbers(routing.outputs, _WIDTH) / _WIDTH**0.5
    router = Router(weight, points[: routing.experts] / 4, routing, points)
    yield "routing", lambda kernels: kernels.route(x, kernels.prepare_router(router))
    ids = torch.arange(60, device=draw.device).view(20, 3) * 7 % 5
    ids[12:, 0] = 5  # beyond the last one
    factors, bias = draw.numbers(20, 3, dtype=torch.float32).abs(), draw.numbers(2 * _WIDTH)
    for kind in (None, "W4A16", "W8A8"):
        parts = [
            _weight(draw, kind) if kind else draw.numbers(_WIDTH, _WIDTH) / _WIDTH**0.5 for _ in range(6)
        ]

        def call(kernels: Kernels, kind: Any = kind, parts: Any = parts) -> Sequence[Tensor]:
            first = [_stacked(part) if kind else part.repeat(2, 1) for part in parts]
            mlps = [
                Mlp(Linear(kernels.prepare_linear(one), bias), Linear(kernels.prepare_linear(other), None))
                for one, other in zip(first, parts[1:], strict=False)
            ]
            experts = kernels.prepare_experts(mlps, x.dtype)
            found = [
                kernels.experts(x[:rows], ids[:rows], factors[:rows], experts, "silu") for rows in (1, 20)
            ]
            return [*map(_rounded, found)] if kind == "W8A8" else found

        yield f"experts{f' of {kind}' if kind else ''}", call


def _mixers(draw: _Draw) -> Iterator[tuple[str, Call]]:
    """Mixers with a recurrent state, for rows of one token and for longer ones, one of which its state stays within."""

    def numbers(*shape: int) -> Tensor:
        return draw.numbers(*shape, dtype=torch.float32) / 2

    convolution = Convolution(numbers(4, 96), numbers(96))
    rate, bias, norm = -numbers(2).abs() - 0.05, numbers(2), numbers(64).abs() + 0.5
    delta = GatedDelta(convolution, rate, bias, norm[:32], 1, 2, 16, 32, 1e-6)
    space = StateSpace(convolution, rate, bias, numbers(2), norm, 2, 1, 16, 32, 1, 1e-5)
    mixers: dict[str, tuple[Mixer, tuple[int, ...]]] = {
        "short convolution": (ShortConvolution(convolution), (288,)),
        "gated delta rule": (delta, (160, 4)),
        "Mamba-2": (space, (162,)),
    }
    ones = StepRows(np.array([2, 0]), np.arange(3), np.array([False, True]), np.ones(2, dtype=np.int64))
    long = StepRows(np.array([1, 2]), np.array([0, 40, 41]), np.array([True, False]), np.array([36, 1]))
    for name, (mixer, widths) in mixers.items():
        inputs = [draw.numbers(41, width) for width in widths]
        states = [numbers(3, 3, 96), numbers(3, 2, 16, 32)]

        def call(
            kernels: Kernels, mixer: Mixer = mixer, inputs: Any = inputs, states: Any = states
        ) -> Sequence[Tensor]:
            prepared, found = kernels.prepare_mixer(mixer), list[Tensor]()
            for rows in (ones, long):
                own, tokens = [state.clone() for state in states], int(rows.starts[-1])
                found.append(kernels.mix([x[:tokens] for x in inputs], prepared, rows, own))
                found += map(_rounded, own)
            return found

        yield name, call


def _adapters(draw: _Draw) -> Call:
    """Two adapters beside tokens without one."""
    layers = []
    for rank in (4, 17):
        down, ups = draw.numbers(2 * rank, _WIDTH) / _WIDTH**0.5, draw.numbers(2, 90, rank) / rank**0.5
        layers.append([{"gate_up": Change(down, (Part(0, ups[0]), Part(90, ups[1])))}])
    x, out = draw.numbers(40, _WIDTH), draw.numbers(40, 180)
    batch, tokens = _batch(draw, _CONTEXTS, _LENGTHS), (np.arange(3, 25), np.arange(30, 40))

    def call(kernels: Kernels) -> Sequence[Tensor]:
        given = [
            AdapterTokens(kernels.prepare_adapter(layer, None), own)
            for layer, own in zip(layers, tokens, strict=True)
        ]
        changes = kernels.step_changes(replace(batch, adapters=given, kept={}))
        return [changes.add(0, "gate_up", x, out.clone())]

    return call


def _adapters_of_experts(draw: _Draw) -> Call:
    """Two adapters beside tokens without one; one of them leaves some linear layers as they are."""
    names = [of_expert(name, expert) for expert in range(5) for name in OF_EXPERTS]
    layers: list[dict[str, Change]] = []
    for rank, left_out in ((4, ""), (17, names[2])):
        layer = {}
        for name in (each for each in names if each != left_out):
            outputs = 2 * _WIDTH if name.startswith(OF_EXPERTS[0]) else _WIDTH
            down, up = draw.numbers(rank, _WIDTH) / _WIDTH**0.5, draw.numbers(outputs, rank) / rank**0.5
            layer[name] = Change(down, (Part(0, up),))
        layers.append(layer)
    weights = [draw.numbers(3 * _WIDTH, _WIDTH) / _WIDTH**0.5 for _ in range(5)]
    ids, factors = (
        torch.arange(120, device=draw.device).view(40, 3) * 7 % 5,
        draw.numbers(40, 3).float().abs(),
    )
    x, batch = draw.numbers(40, _WIDTH), _batch(draw, _CONTEXTS, _LENGTHS)
    tokens = (np.arange(3, 25), np.arange(30, 40))

    def call(kernels: Kernels) -> Sequence[Tensor]:
        given = [
            AdapterTokens(kernels.prepare_adapter([layer], None), own)
            for layer, own in zip(layers, tokens, strict=True)
        ]
        parts = [each.split([2 * _WIDTH, _WIDTH]) for each in weights]
        mlps = [Mlp(*(Linear(kernels.prepare_linear(each), None) for each in pair)) for pair in parts]
        experts = kernels.prepare_experts(mlps, x.dtype)
        changes = kernels.step_changes(replace(batch, adapters=given, kept={}))
        return [kernels.experts(x, ids, factors, experts, "silu", changes.of(0))]

    return call


def _sampling(draw: _Draw) -> Iterator[tuple[str, Call]]:
    """Tokens whose logits and numbers are far enough from each other for any rounding."""
    rows = 6
    logits = torch.full((rows, _VOCAB), -30.0, device=draw.device)
    for number, token in enumerate((7, 300, 511, 512, 599)):
        logits[:, token] = -0.5 * number
    fixed = (np.full(rows, 0.9), np.array([0, 0, 0.2, 0, 0, 0.3]), np.array([0, 2, 0, 0, 3, 4]))
    choice = (*fixed, np.array([1, 1, 1, 0.7, 0.8, 1]), np.array([0.05, 0.9, 0.7, 0.95, 0.5, 0.3]))
    words = np.zeros((1, -(-_VOCAB // 32)), dtype=np.int32)
    words[0, 9] = 1 << 12  # token 300
    counts = draw.integers(0, 3, rows, _VOCAB, dtype=torch.int32)
    counts[:, ::3] += IN_PROMPT
    scores, places = draw.numbers(rows, _VOCAB, dtype=torch.float32), np.arange(2)
    factors = (np.full(2, 1.3), np.full(2, 0.5), np.full(2, 0.25))
    penalty = Penalty(places, places + 1, *factors, np.array([7, 300]), places * 0, places * 2)
    offsets = torch.arange(12, device=draw.device) % 4
    first, given = torch.arange(12, device=draw.device) - offsets, draw.integers(-1, 2, 2, 12)

    def penalized(kernels: Kernels) -> Sequence[Tensor]:
        changed = scores.clone()
        kernels.penalize(changed, counts, penalty)
        return [changed]

    yield "likeliest token", lambda kernels: [kernels.likeliest(logits)]
    yield "sampling", lambda kernels: [kernels.choose(logits, TokenChoice(*(each.copy() for each in choice)))]
    allowed = Allowed(np.array([1]), words)
    yield "allowed tokens", lambda kernels: [kernels.restrict(logits, allowed).clamp(min=-99)]
    yield "penalties", penalized
    yield "accepted drafts", lambda kernels: [kernels.accept(*given, first, offsets)]


def _layers(draw: _Draw, dtype: torch.dtype, heads: HeadShape, kind: str | None) -> Call:
    """Two layers from tokens to states, as one call: what is fused only there, too."""
    queries, kv_heads, head_dim = heads
    wide = (queries + 2 * kv_heads) * head_dim
    shapes = ((wide, _WIDTH), (_WIDTH, queries * head_dim), (2 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH))
    weights: list[Any] = [draw.numbers(*shape) / shape[1] ** 0.5 for shape in shapes]
    if kind is not None:
        weights[2:] = [_stacked(_weight(draw, kind)), _weight(draw, kind)]
    norm = draw.numbers(_WIDTH).float()
    batch, table = _batch(draw, (40, 20), (1, 9)), draw.numbers(_VOCAB, _WIDTH)
    rotation = draw.numbers(64, 2, head_dim).float()

    def call(kernels: Kernels) -> Sequence[Tensor]:
        qkv, output, gate_up, down = (Linear(kernels.prepare_linear(weight), None) for weight in weights)
        layer = Layer(qkv, output, Mlp(gate_up, down), None, None, norm, None, norm, None, 0)
        stack = Stack(
            embedding=table,
            embedding_scale=1.0,
            ropes=(rotation,),
            layers=(layer, layer),
            input_norm=norm,
            dtype=dtype,
            heads=heads,
            activation="silu",
            eps=1e-5,
            scale=head_dim**-0.5,
            softcap=None,
        )
        shape = (2, batch.block_tables.numel(), _BLOCK, kv_heads, head_dim)
        pages = [Pages(*torch.zeros(shape, dtype=dtype, device=draw.device)) for _ in stack.layers]
        states = kernels.run_stack(kernels.prepare_stack(stack), batch, pages)
        return [states if kind is None else _rounded(states)]

    return call


def _stacked(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight twice, one below the other."""
    zeros = None if weight.zeros is None else weight.zeros.repeat(2, 1)
    return replace(weight, values=weight.values.repeat(2, 1), scales=weight.scales.repeat(2, 1), zeros=zeros)
