"""Adapters in one call, call by call, and merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.compute.batch import AdapterTokens, Batch, adapter_tokens
from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.adapters import (
    LINEARS,
    OF_EXPERTS,
    Change,
    Part,
    check_changes,
    of_expert,
    to_device,
)
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.native_calls import NativeStack
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.kernels.stack import Linear, Stack, apply
from tests.compute.kernels.stacks import (
    BLOCK,
    CPU,
    DECODING,
    HEADS,
    HIDDEN,
    INNER,
    MIXED,
    PROMPTS,
    make,
    pages_for,
    random,
    with_experts,
)
from tests.oracle.harness import pack

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

ATTENDED = HEADS.heads * HEADS.head_dim
KV = HEADS.kv_heads * HEADS.head_dim
SIZES = {
    "qkv": (ATTENDED + 2 * KV, HIDDEN),
    "output": (HIDDEN, ATTENDED),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
PARTS = {
    "qkv": ((0, ATTENDED), (ATTENDED, KV), (ATTENDED + KV, KV)),
    "output": ((0, HIDDEN),),
    "gate_up": ((0, INNER), (INNER, INNER)),
    "down": ((0, HIDDEN),),
}
BATCHES = (PROMPTS, MIXED, DECODING)


def adapter(
    seed: int,
    dtype: torch.dtype,
    ranks: tuple[int, ...] = (4, 3, 5),
    left_out: frozenset[tuple[int, str]] = frozenset(),
    inner: int = INNER,
) -> list[dict[str, Change]]:
    """Changes of three layers, of several ranks; some linear layers may be left out."""
    wide = {"gate_up": ((0, inner), (inner, inner))}

    def change(name: str, layer: int) -> Change:
        parts = wide.get(name, PARTS[name])
        each = [ranks[(number + layer) % len(ranks)] for number in range(len(parts))]
        inputs, at = inner if name == "down" else SIZES[name][1], 100 * seed + 10 * layer
        downs = [random(rank, inputs, seed=at + number) / inputs**0.5 for number, rank in enumerate(each)]
        ups = [
            random(size, rank, seed=at + 5 + number) / rank**0.5
            for number, ((_, size), rank) in enumerate(zip(parts, each, strict=True))
        ]
        placed = tuple(Part(at, up.to(dtype)) for (at, _), up in zip(parts, ups, strict=True))
        return Change(torch.cat(downs).to(dtype), placed)

    return [
        {name: change(name, layer) for name in LINEARS if (layer, name) not in left_out} for layer in range(3)
    ]


class Unprepared:
    """Makes stacks whose weights are plain tensors."""

    def prepare_linear(self, weight: Tensor) -> Tensor:
        return weight


def merged(stack: Stack, layers: list[dict[str, Change]]) -> Stack:
    """An unprepared stack for the reference, with an adapter in its weights."""

    def linear(old: Linear, change: Change | None) -> Linear:
        weight, begin = old.weight.clone(), 0
        if change is not None:
            for at, up in change.parts:
                rank = up.shape[1]
                weight[at : at + len(up)] += up @ change.down[begin : begin + rank]
                begin += rank
        return Linear(TorchKernels().prepare_linear(weight), old.bias)

    changed = []
    for layer, changes in zip(stack.layers, layers, strict=True):
        gate_up, down = layer.feed
        feed = type(layer.feed)(linear(gate_up, changes.get("gate_up")), linear(down, changes.get("down")))
        qkv, output = linear(layer.qkv, changes.get("qkv")), linear(layer.output, changes.get("output"))
        changed.append(replace(layer, qkv=qkv, output=output, feed=feed))
    return replace(stack, layers=tuple(changed))


def rows_of(batch: Batch, adapters: list[Any]) -> Batch:
    """The batch with an adapter for each row (None: none)."""
    return replace(batch, adapters=adapter_tokens(adapters, np.array(batch.lengths)), kept={})


LEFT_OUT = frozenset({(0, "qkv"), (1, "down"), (2, "output"), (2, "gate_up")})


@pytest.mark.parametrize("rich", [False, True])
def test_rows_of_several_adapters_are_those_of_merged_weights(rich: bool) -> None:
    kernels = TorchKernels()
    stack, plain = make(kernels, torch.float32, rich=rich), make(Unprepared(), torch.float32, rich=rich)
    one, other = adapter(1, torch.float32), adapter(2, torch.float32, (6, 1, 2), LEFT_OUT)
    mixed, pages = pages_for(torch.float32), [pages_for(torch.float32) for _ in range(3)]
    stacks = [merged(plain, one), stack, merged(plain, other)]
    for batch in BATCHES:
        rows = len(batch.lengths)
        order = [one, None, other][:rows]
        owners = np.repeat(np.arange(rows), batch.lengths)[batch.logits_indices.numpy()]
        found = apply(kernels, stack, rows_of(batch, order), mixed)
        each = [apply(kernels, alone, batch, own) for alone, own in zip(stacks, pages, strict=True)]
        for line, owner in enumerate(owners.tolist()):
            torch.testing.assert_close(found[line], each[owner][line], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["plain", "W8A8", "W4A16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_one_call_is_the_layers_call_by_call(level: str, dtype: torch.dtype, kind: str) -> None:
    kernels = CppKernels(level)
    stack = make(kernels, dtype, kind, rich=True)
    prepared = kernels.prepare_stack(stack)
    assert isinstance(prepared, NativeStack)
    ours, theirs = pages_for(dtype), pages_for(dtype)
    adapters = [adapter(1, dtype), None, adapter(2, dtype, (6, 1, 2), LEFT_OUT)]
    native = [None if each is None else kernels.prepare_adapter(each, prepared) for each in adapters]
    bound = (
        2e-5 if dtype == torch.float32 else 0.02
    )  # of the norm: rounding to 8 bits moves single values far
    for batch in BATCHES:
        rows = len(batch.lengths)
        at_once = kernels.run_stack(prepared, rows_of(batch, native[:rows]), ours)
        expected = apply(kernels, stack, rows_of(batch, adapters[:rows]), theirs)
        assert (at_once - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_an_adapter_do_not_notice_others(dtype: torch.dtype) -> None:
    kernels = CppKernels()
    prepared = kernels.prepare_stack(make(kernels, dtype))
    native = kernels.prepare_adapter(adapter(1, dtype), prepared)
    for batch in (MIXED, DECODING):
        rows = len(batch.lengths)
        found = kernels.run_stack(prepared, rows_of(batch, [None, native, None][:rows]), pages_for(dtype))
        plain = kernels.run_stack(prepared, batch, pages_for(dtype))
        assert torch.equal(found[0], plain[0])
        assert not torch.equal(found[1], plain[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    kernels = CppKernels()
    prepared = kernels.prepare_stack(make(kernels, dtype))
    one, other = (kernels.prepare_adapter(adapter(seed, dtype), prepared) for seed in (1, 2))
    together = kernels.run_stack(prepared, rows_of(MIXED, [one, one, one]), pages_for(dtype))
    apart = kernels.run_stack(prepared, rows_of(MIXED, [one, other, other]), pages_for(dtype))
    assert torch.equal(together[0], apart[0])


LONG = pack(
    [1, *range(20)] * 7, [3, 0], [76, 71], [[*range(1, 21)], [*range(21, 41)]], [0, 75, 146], BLOCK, CPU
)


@pytest.mark.parametrize("rank", [1, 8, 16, 33, 70])
@pytest.mark.parametrize("level", LEVELS)
def test_wide_layers_of_any_rank(level: str, rank: int) -> None:
    """Inputs long enough to be folded, ranks of a part of a panel and of several; more rows than a task takes."""
    kernels = CppKernels(level)
    stack = make(kernels, torch.float32, inner=512, positions=128)
    prepared = kernels.prepare_stack(stack)
    layers = [adapter(seed, torch.float32, (rank,), inner=512) for seed in (1, 2)]
    native = [kernels.prepare_adapter(each, prepared) for each in layers]
    ours, theirs = pages_for(torch.float32, blocks=48), pages_for(torch.float32, blocks=48)
    found = kernels.run_stack(prepared, rows_of(LONG, native), ours)
    expected = apply(kernels, stack, rows_of(LONG, layers), theirs)
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)


def test_a_layer_with_experts_takes_changes_of_its_attention() -> None:
    kernels = CppKernels()
    stack = with_experts(kernels, make(kernels, torch.float32))
    prepared = kernels.prepare_stack(stack)
    left_out = frozenset({(0, "gate_up"), (0, "down"), (2, "gate_up"), (2, "down")})
    layers = adapter(1, torch.float32, left_out=left_out)
    native = kernels.prepare_adapter(layers, prepared)
    found = kernels.run_stack(prepared, rows_of(MIXED, [native] * 3), pages_for(torch.float32))
    expected = apply(kernels, stack, rows_of(MIXED, [layers] * 3), pages_for(torch.float32))
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)


WIDTHS = (8, 16, 24, 32, 40, 56)
"""Those of the experts of `with_experts`."""


def of_experts(seed: int, dtype: torch.dtype, left_out: tuple[str, ...] = ()) -> list[dict[str, Change]]:
    """Changes of attention, of the MLP and of experts; some experts may be left out."""
    plain = adapter(seed, dtype)
    for number in (0, 2):
        changes = {name: each for name, each in plain[number].items() if name not in OF_EXPERTS}
        for expert, width in enumerate(WIDTHS):
            own = adapter(10 * seed + expert, dtype, inner=width)[number]
            changes |= {of_expert(name, expert): own[name] for name in OF_EXPERTS}
        plain[number] = {name: each for name, each in changes.items() if name not in left_out}
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_changes_of_experts_in_one_call_are_those_of_the_definition(level: str, dtype: torch.dtype) -> None:
    kernels = CppKernels(level)
    stack = with_experts(kernels, make(kernels, dtype))
    prepared = kernels.prepare_stack(stack)
    assert isinstance(prepared, NativeStack)
    adapters = [of_experts(1, dtype), None, of_experts(2, dtype, ("gate_up 3", "down 1", "down 5"))]
    native = [None if each is None else kernels.prepare_adapter(each, prepared) for each in adapters]
    ours, theirs = pages_for(dtype), pages_for(dtype)
    for batch in BATCHES:
        rows = len(batch.lengths)
        found = kernels.run_stack(prepared, rows_of(batch, native[:rows]), ours)
        expected = apply(kernels, stack, rows_of(batch, adapters[:rows]), theirs)
        assert (found - expected).norm() <= (2e-5 if dtype == torch.float32 else 0.02) * expected.norm()


def test_changes_of_other_sizes_are_refused() -> None:
    sizes: list[Mapping[str, tuple[int, int]]] = [SIZES] * 3
    check_changes(adapter(1, torch.float32), sizes)
    for name, size in (("qkv", (ATTENDED, HIDDEN)), ("down", (HIDDEN, INNER + 1))):
        with pytest.raises(ValueError, match=f"the change of {name} does not fit"):
            check_changes(adapter(1, torch.float32), [SIZES, SIZES | {name: size}, SIZES])
    with pytest.raises(ValueError, match="3 layers for 2"):
        check_changes(adapter(1, torch.float32), sizes[:2])


def test_an_adapter_of_another_dtype_or_tokens_outside_are_refused() -> None:
    kernels = CppKernels()
    prepared = kernels.prepare_stack(make(kernels, torch.float32))
    with pytest.raises(ValueError, match="an adapter of"):
        kernels.prepare_adapter(adapter(1, torch.bfloat16), prepared)
    native = kernels.prepare_adapter(adapter(1, torch.float32), prepared)
    for tokens in ([0, 8], [1, 1], [-1]):
        batch = replace(MIXED, adapters=(AdapterTokens(native, np.array(tokens)),), kept={})
        with pytest.raises(IndexError, match="tokens of an adapter must ascend"):
            kernels.run_stack(prepared, batch, pages_for(torch.float32))


def test_an_adapter_is_moved_layer_by_layer() -> None:
    """Each tensor stays what it is, and begins at whole words."""
    layers = [*adapter(1, torch.bfloat16, (3, 1, 5)), {}]
    moved = to_device(layers, torch.device("cpu", 0))  # which no tensor here is on, by its name
    assert [list(layer) for layer in moved] == [list(layer) for layer in layers]
    for layer, before in zip(moved, layers, strict=True):
        addresses = set()
        for name, change in before.items():
            pairs = [(layer[name].down, change.down)]
            for part, old in zip(layer[name].parts, change.parts, strict=True):
                assert part.offset == old.offset
                pairs.append((part.up, old.up))
            for ours, theirs in pairs:
                assert torch.equal(ours, theirs)
                assert ours.is_contiguous()
                assert ours.data_ptr() % 16 == 0
                addresses.add(ours.untyped_storage().data_ptr())
        assert len(addresses) == bool(before)
    assert to_device(layers, CPU)[0] is layers[0]


def test_tokens_of_rows_are_grouped_by_adapter() -> None:
    one, other = object(), object()
    groups = adapter_tokens([one, None, other, one], np.array([1, 1, 2, 3]))
    assert [(group.adapter, group.tokens.tolist()) for group in groups] == [
        (one, [0, 4, 5, 6]),
        (other, [2, 3]),
    ]
    assert adapter_tokens([None, None], np.array([1, 2])) == ()
