"""Layers with mixers and gates in one call are the same layers call by call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.compute.batch import AdapterTokens, Batch, StepInterrupt, StepInterrupted
from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.adapters import Change, Part
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Mlp
from headrace.compute.kernels.measure import TimedKernels
from headrace.compute.kernels.mixers import (
    Convolution,
    GatedDelta,
    Mixer,
    Multipliers,
    ShortConvolution,
    StateSpace,
)
from headrace.compute.kernels.native_calls import NativeStack
from headrace.compute.kernels.native_mixers import NativeMixer
from headrace.compute.kernels.recurrent import RecurrentStates
from headrace.compute.kernels.stack import Beside, Stack, apply
from headrace.compute.states import StateShape
from tests.compute.kernels.stacks import (
    CPU,
    DECODING,
    HIDDEN,
    MIXED,
    PROMPTS,
    linear,
    make,
    pages_for,
    random,
    with_experts,
)

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

SLOTS = {id(PROMPTS): [3, 1], id(MIXED): [3, 1, 4], id(DECODING): [3, 1]}


def with_slots(batch: Batch, ahead: list[int] | None = None) -> Batch:
    given = None if ahead is None else np.array(ahead)
    return replace(batch, slots=np.array(SLOTS[id(batch)]), ahead=given, kept={})


BATCHES = tuple(map(with_slots, (PROMPTS, MIXED, DECODING)))


def _convolution(taps: int, channels: int, *, bias: bool) -> Convolution:
    weight = random(taps, channels, seed=taps) * 0.4
    return Convolution(weight, random(channels, seed=5) * 0.2 if bias else None)


def delta() -> Mixer:
    heads = (-random(4, seed=1).abs() - 0.01, random(4, seed=2), random(16, seed=3).abs() + 0.5)
    return GatedDelta(_convolution(4, 2 * 16 + 64, bias=False), *heads, 2, 4, 8, 16, 1e-6)


def space(**options: Any) -> Mixer:
    vectors = (-random(4, seed=1).abs() - 0.01, random(4, seed=2), random(4, seed=3))
    convolution, norm = _convolution(4, 48 + 2 * 2 * 8, bias=True), random(48, seed=4).abs() + 0.5
    return StateSpace(convolution, *vectors, norm, 4, 2, 8, 12, 2, 1e-5, (0.01, 2.0))._replace(**options)


def convolution() -> Mixer:
    return ShortConvolution(_convolution(3, HIDDEN, bias=True))


def recurrent(kernels: Any, stack: Stack, number: int, mixer: Mixer, kind: str = "plain") -> Stack:
    """The stack with a mixer in the place of a layer's attention."""
    of: NativeMixer = kernels.prepare_mixer(mixer)
    first, *second = (
        linear(kernels, width, HIDDEN, stack.dtype, kind if width > 8 else "plain", biased=False)
        for width in of.widths
    )
    layer = replace(
        stack.layers[number],
        qkv=first,
        gates=second[0] if second else None,
        output=linear(kernels, HIDDEN, of.inner, stack.dtype, kind, biased=False),
        mixer=of,
        states=tuple((number, state) for state in range(len(of.shapes))),
    )
    return _with_layer(stack, number, layer)


def _with_layer(stack: Stack, number: int, layer: Any) -> Stack:
    return replace(stack, layers=(*stack.layers[:number], layer, *stack.layers[number + 1 :]))


def gated(kernels: Any, stack: Stack, number: int) -> Stack:
    """The stack with gates of a layer's attention."""
    gates = linear(
        kernels, stack.heads.heads * stack.heads.head_dim, HIDDEN, stack.dtype, "plain", biased=True
    )
    return _with_layer(stack, number, replace(stack.layers[number], gates=gates))


def qwen(kernels: Any, dtype: torch.dtype, kind: str) -> Stack:
    stack = gated(kernels, make(kernels, dtype, kind, inner=64), 1)
    return recurrent(kernels, recurrent(kernels, stack, 0, delta(), kind), 2, delta(), kind)


def qwen_that_ends_with_attention(kernels: Any, dtype: torch.dtype, kind: str) -> Stack:
    stack = with_experts(kernels, make(kernels, dtype, kind))
    stack = recurrent(kernels, recurrent(kernels, stack, 0, delta(), kind), 1, delta(), kind)
    return gated(kernels, stack, 2)


def lfm2(kernels: Any, dtype: torch.dtype, kind: str) -> Stack:
    stack = recurrent(kernels, make(kernels, dtype, kind, rich=True), 0, convolution(), kind)
    return replace(recurrent(kernels, stack, 2, convolution(), kind), activation="silu")


def granite(kernels: Any, dtype: torch.dtype, kind: str) -> Stack:
    stack = with_experts(kernels, make(kernels, dtype, kind))
    return recurrent(kernels, recurrent(kernels, stack, 0, space(), kind), 2, space(norm=None), kind)


def nemotron(kernels: Any, dtype: torch.dtype, kind: str) -> Stack:
    """MLPs without gates, and layers without one."""
    stack = replace(make(kernels, dtype, kind), activation="squared_relu")
    mlp = Mlp(*(linear(kernels, *sizes, dtype, kind, biased=False) for sizes in ((40, HIDDEN), (HIDDEN, 40))))
    for number in range(3):
        feed = None if number == 1 else mlp
        norm = None if number == 1 else stack.layers[number].mlp_norm
        stack = _with_layer(stack, number, replace(stack.layers[number], feed=feed, mlp_norm=norm))
    return recurrent(kernels, recurrent(kernels, stack, 0, space(), kind), 2, space(norm_first=True), kind)


def falcon(kernels: Any, dtype: torch.dtype, kind: str) -> Stack:
    """Mixers beside attention, and multipliers."""
    stack = replace(make(kernels, dtype, kind), multipliers=Multipliers(0.9, 1.3, 0.7, 1.1))
    for number in range(3):
        of: NativeMixer = kernels.prepare_mixer(space(gate_scale=0.4, step_scale=1.7))
        beside = Beside(
            linear(kernels, of.widths[0], HIDDEN, dtype, kind, biased=False),
            linear(kernels, HIDDEN, of.inner, dtype, kind, biased=False),
        )
        keys = ((number, 0), (number, 1))
        stack = _with_layer(
            stack, number, replace(stack.layers[number], mixer=of, beside=beside, states=keys)
        )
    return stack


FAMILIES: dict[str, Callable[[Any, torch.dtype, str], Stack]] = {
    each.__name__: each for each in (qwen, qwen_that_ends_with_attention, lfm2, granite, nemotron, falcon)
}
BY_TORCH = {"qwen", "qwen_that_ends_with_attention"}
"""Those whose gates torch computes when layers run call by call: they may differ in the last bit."""
IN_FLOAT32 = {"falcon"}
"""Those whose sums of products are rounded once in float32."""


def with_states(stack: Stack) -> Stack:
    """The stack with states of its own."""
    shapes = {
        key: StateShape(shape, torch.float32)
        for layer in stack.layers
        if layer.mixer is not None
        for key, shape in zip(layer.states, layer.mixer.shapes, strict=True)
    }
    states = RecurrentStates(shapes)
    states.allocate(6, 1, CPU)
    return replace(stack, recurrent=states)


def states_of(stack: Stack) -> list[Tensor]:
    assert stack.recurrent is not None
    return [state for layer in stack.layers for state in stack.recurrent.of(layer.states)]


def step(kernels: Any, stack: Stack, run: Any, batch: Batch, pages: Any) -> Tensor:
    """A step of ``run``, the prepared stack, or of its definition."""
    assert stack.recurrent is not None
    with stack.recurrent.step(batch):
        if run is None:
            return apply(kernels, stack, batch, pages)
        out: Tensor = kernels.run_stack(run, batch, pages)
        return out


class Pair:
    """The same layers in one call and call by call, each with pages and states of its own."""

    def __init__(self, kernels: Any, stack: Stack) -> None:
        self.kernels = kernels
        self.stacks = with_states(stack), with_states(stack)
        self.prepared = kernels.prepare_stack(self.stacks[0])
        assert isinstance(self.prepared, NativeStack)
        count = sum(layer.attends for layer in stack.layers)
        self.pages = tuple(pages_for(stack.dtype)[:count] for _ in range(2))

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        runs = zip(self.stacks, (self.prepared, None), self.pages, strict=True)
        one, other = (step(self.kernels, stack, run, batch, pages) for stack, run, pages in runs)
        return one, other

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """States, keys and values of both."""
        pairs = list(zip(*map(states_of, self.stacks), strict=True))
        for one, other in zip(*self.pages, strict=True):
            pairs += [(one.keys, other.keys), (one.values, other.values)]
        return pairs


def same(one: Tensor, other: Tensor, *, by_torch: bool) -> None:
    if not by_torch:
        assert torch.equal(one, other)
        return
    within = 2e-5 if one.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(one, other, rtol=within, atol=within)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W8A8"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_is_all_calls(level: str, dtype: torch.dtype, family: str, kind: str) -> None:
    kernels = CppKernels(level)
    both = Pair(kernels, FAMILIES[family](kernels, dtype, kind))
    by_torch = family in (BY_TORCH | IN_FLOAT32 if dtype == torch.float32 else BY_TORCH)
    batches = (*BATCHES, with_slots(PROMPTS), with_slots(MIXED, [0, 2, 3]))
    for batch, wanted in zip(batches, (0, 3, 2, 0, 3), strict=True):
        one, other = both.step(batch)
        assert len(one) == wanted
        assert one.isfinite().all()
        same(one, other, by_torch=by_torch)
    for one, other in both.kept():
        assert one.any()
        same(one.float(), other.float(), by_torch=by_torch)


def adapter(stack: Stack) -> list[dict[str, Change]]:
    """A change of each linear layer that an adapter may have, of rank 2."""

    def change(weight: Any, seed: int) -> Change:
        part = Part(0, (random(weight.outputs, 2, seed=seed) * 0.3).to(stack.dtype))
        return Change((random(2, weight.inputs, seed=seed + 1) * 0.3).to(stack.dtype), (part,))

    changes = []
    for layer in stack.layers:
        mlp = layer.feed if isinstance(layer.feed, Mlp) else None
        linears = {"qkv": layer.qkv, "output": layer.output}
        linears |= {} if mlp is None else {"gate_up": mlp.gate_up, "down": mlp.down}
        changes.append({name: change(each.weight, seed) for seed, (name, each) in enumerate(linears.items())})
    return changes


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_change_layers_with_mixers_too(family: str) -> None:
    kernels = CppKernels()
    both = Pair(kernels, FAMILIES[family](kernels, torch.float32, "plain"))
    layers, tokens, found = adapter(both.stacks[1]), np.array([0, 3, 4, 5]), []
    for stack, run, pages in zip(both.stacks, (both.prepared, None), both.pages, strict=True):
        prepared = kernels.prepare_adapter(layers, run or stack)
        step(kernels, stack, run, with_slots(PROMPTS), pages)
        batch = replace(with_slots(MIXED), adapters=(AdapterTokens(prepared, tokens),))
        found.append(step(kernels, stack, run, batch, pages))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    plain = Pair(kernels, FAMILIES[family](kernels, torch.float32, "plain"))
    plain.step(with_slots(PROMPTS))
    assert not torch.allclose(found[0], plain.step(with_slots(MIXED))[0], atol=1e-2)


def test_an_interrupted_step_leaves_states_as_they_were() -> None:
    kernels = CppKernels()
    both = Pair(kernels, qwen(kernels, torch.float32, "plain"))
    both.step(with_slots(PROMPTS))
    before, interrupt = [state.clone() for state in states_of(both.stacks[0])], StepInterrupt()
    interrupt.set()
    batch = replace(with_slots(MIXED), interrupt=interrupt)
    for stack, run, pages in zip(both.stacks, (both.prepared, None), both.pages, strict=True):
        with pytest.raises(StepInterrupted):
            step(kernels, stack, run, batch, pages)
    for state, old in zip(states_of(both.stacks[0]), before, strict=True):
        assert torch.equal(state, old)
    same(*both.step(with_slots(MIXED)), by_torch=True)


def test_states_that_are_allocated_again_are_read_where_they_are() -> None:
    kernels = CppKernels()
    both = Pair(kernels, granite(kernels, torch.float32, "plain"))
    both.step(with_slots(PROMPTS))
    for stack in both.stacks:
        assert stack.recurrent is not None
        stack.recurrent.allocate(8, 0, CPU)
    assert torch.equal(*both.step(with_slots(PROMPTS)))
    assert all(state.any() for state in states_of(both.stacks[0]))


def test_rows_and_states_that_do_not_fit_are_refused() -> None:
    kernels = CppKernels()
    both = Pair(kernels, qwen(kernels, torch.float32, "plain"))
    stack, pages = both.stacks[0], both.pages[0]
    states = stack.recurrent
    assert states is not None
    for batch, reason in (
        (replace(with_slots(PROMPTS), lengths=[5, 2], contexts=[5, 2]), "rows of 7 tokens for a batch of 8"),
        (replace(with_slots(PROMPTS), slots=np.array([3, -2])), r"slots\[1\] is -2; there are 7"),
    ):
        with pytest.raises((ValueError, IndexError), match=reason):
            step(kernels, stack, both.prepared, batch, pages)
    without = kernels.prepare_stack(replace(stack, recurrent=None))
    with pytest.raises(ValueError, match="layer 0 has no words of a mixer, or no states"):
        kernels.run_stack(without, MIXED, pages)
    other = {key: StateShape((2, 2), torch.float32) for layer in stack.layers for key in layer.states}
    states = RecurrentStates(other)
    states.allocate(6, 0, CPU)
    of_others = replace(stack, recurrent=states)
    with pytest.raises(ValueError, match="for a mixer of"):
        step(kernels, of_others, kernels.prepare_stack(of_others), with_slots(PROMPTS), pages)


def test_layers_of_other_mixers_run_call_by_call() -> None:
    kernels = CppKernels()
    stack = recurrent(
        kernels, make(kernels, torch.float32), 0, ShortConvolution(_convolution(9, HIDDEN, bias=False))
    )
    assert kernels.prepare_stack(stack) is stack
    without_steps = qwen(kernels, torch.float32, "plain")
    without_steps = _with_layer(without_steps, 0, replace(without_steps.layers[0], gates=None))
    assert kernels.prepare_stack(without_steps) is without_steps


def test_no_drafts_are_computed_over_states() -> None:
    kernels = CppKernels()
    both = Pair(kernels, qwen(kernels, torch.float32, "plain"))
    head = kernels.prepare_linear(random(24, HIDDEN))
    assert (
        kernels.draft(both.prepared, head, with_slots(PROMPTS), both.pages[0], np.array([2, 2]), 0.1) is None
    )


@pytest.mark.parametrize("family", ["qwen", "granite", "falcon"])
def test_timed_kernels_count_the_same_products(family: str) -> None:
    kernels = CppKernels()
    both = Pair(kernels, FAMILIES[family](kernels, torch.bfloat16, "plain"))
    totals = []
    for stack, run, pages in zip(both.stacks, (both.prepared, None), both.pages, strict=True):
        timed = TimedKernels(kernels)
        assert stack.recurrent is not None
        for batch in BATCHES[:2]:
            with stack.recurrent.step(batch):
                timed.run_stack(run or stack, batch, pages)
        totals.append(timed.totals)
    assert totals[0]["linear products"] == totals[1]["linear products"] > 0
    assert totals[0]["elementwise"] > 0
