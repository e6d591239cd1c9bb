"""A stack and its head in one call: the tokens of both one after the other, at every level that this machine has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.compute.batch import Batch, StepInterrupt, StepInterrupted, Taps
from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.native_calls import NativeStack
from headrace.compute.kernels.packed import PackedWeight, pack_screen
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.kernels.screen import Screen
from tests.compute.kernels.stacks import (
    BLOCK,
    CPU,
    DECODING,
    HIDDEN,
    MIXED,
    PROMPTS,
    make,
    pages_for,
    random,
)
from tests.compute.kernels.test_hybrid_stacks import BATCHES, Pair, qwen
from tests.compute.kernels.weights import quantized_weight
from tests.oracle.harness import pack

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

OUTPUTS = 700


def head_of(kernels: CppKernels, dtype: torch.dtype, screened: bool) -> PackedWeight:
    weight = random(OUTPUTS, HIDDEN, seed=5).to(dtype)
    head = kernels._pack(weight, consume=False, coded=kernels.coded and not screened)
    assert isinstance(head, PackedWeight)
    return head._replace(screen=pack_screen(weight, kernels._panel, kernels._memory) if screened else None)


def renewed(batch: Batch) -> Batch:
    return replace(batch, kept={})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("screened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_pages_are_those_of_two_calls(level: str, screened: bool, dtype: torch.dtype) -> None:
    kernels = CppKernels(level)
    stack, head = kernels.prepare_stack(make(kernels, dtype, rich=True)), head_of(kernels, dtype, screened)
    run = kernels.prepare_greedy(stack, head)
    assert run is not None
    one, other = pages_for(dtype), pages_for(dtype)
    for batch in (PROMPTS, MIXED, DECODING, MIXED, DECODING):
        tokens = run(batch, one)
        states = kernels.run_stack(stack, renewed(batch), other)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == kernels.likeliest_outputs(states, head).tolist()
    assert all(torch.equal(mine.keys, theirs.keys) for mine, theirs in zip(one, other, strict=True))
    assert one[0].keys.any()


def test_arguments_that_are_kept_are_those_of_the_values_that_the_batch_has_now() -> None:
    kernels = CppKernels()
    stack, head = kernels.prepare_stack(make(kernels, torch.float32)), head_of(kernels, torch.float32, True)
    run, pages = kernels.prepare_greedy(stack, head), pages_for(torch.float32)
    assert run is not None
    batch = replace(renewed(MIXED), tokens=MIXED.tokens.clone(), context_lens=MIXED.context_lens.clone())
    first = run(batch, pages).tolist()
    kernels.run_stack(stack, PROMPTS, pages)
    larger = pack([*range(12)], [0], [12], [[8, 9, 10]], [11], BLOCK, CPU)  # for which the room grows
    kernels.run_stack(stack, larger, pages)
    batch.tokens.copy_(MIXED.tokens.flip(0))
    other = pages_for(torch.float32)
    kernels.run_stack(stack, PROMPTS, other)
    expected = kernels.run_stack(stack, replace(renewed(MIXED), tokens=MIXED.tokens.flip(0)), other)
    found = run(batch, pages).tolist()
    assert found == kernels.likeliest_outputs(expected, head).tolist() != first
    batch.context_lens[0] = 10_000
    with pytest.raises(IndexError):
        run(batch, pages)


def test_steps_with_tapped_states_or_an_interrupt_keep_no_arguments_of_others() -> None:
    kernels = CppKernels()
    stack, head = kernels.prepare_stack(make(kernels, torch.float32)), head_of(kernels, torch.float32, False)
    run, pages = kernels.prepare_greedy(stack, head), pages_for(torch.float32)
    assert run is not None
    plain = renewed(DECODING)
    tokens = run(plain, pages).tolist()
    taps = Taps(torch.zeros(len(DECODING.tokens), 2 * HIDDEN), np.array([0, 2]))
    assert run(replace(plain, taps=taps), pages).tolist() == tokens
    assert taps.states.all()
    interrupt = StepInterrupt()
    assert run(replace(plain, interrupt=interrupt), pages).tolist() == tokens
    interrupt.set()
    with pytest.raises(StepInterrupted):
        run(replace(plain, interrupt=interrupt), pages)
    assert run(plain, pages).tolist() == tokens


@pytest.mark.parametrize("level", LEVELS)
def test_layers_with_recurrent_states(level: str) -> None:
    kernels = CppKernels(level)
    both = Pair(kernels, qwen(kernels, torch.float32, "plain"))
    head = head_of(kernels, torch.float32, False)
    run = kernels.prepare_greedy(both.prepared, head)
    assert run is not None
    for batch in BATCHES:
        recurrent = both.stacks[0].recurrent
        assert recurrent is not None
        with recurrent.step(batch):
            tokens = run(batch, both.pages[0])
        recurrent = both.stacks[1].recurrent
        assert recurrent is not None
        apart = kernels.prepare_stack(both.stacks[1])
        with recurrent.step(batch):
            states = kernels.run_stack(apart, renewed(batch), both.pages[1])
        assert tokens.tolist() == kernels.likeliest_outputs(states, head).tolist()
    assert all(torch.equal(mine, theirs) for mine, theirs in both.kept())


def test_a_screen_learns_whether_it_has_helped_and_is_not_used_while_it_pauses() -> None:
    kernels = CppKernels()
    stack, head = kernels.prepare_stack(make(kernels, torch.float32)), head_of(kernels, torch.float32, True)
    screen = head.screen
    assert isinstance(screen, Screen)
    run, pages = kernels.prepare_greedy(stack, head), pages_for(torch.float32)
    assert run is not None
    noted: list[int] = []
    learn = screen.note
    screen.note = lambda groups: (noted.append(groups), learn(-1))[1]  # type: ignore[method-assign]
    found = [run(DECODING, pages).tolist() for _ in range(6)]
    assert all(each == found[0] for each in found)
    assert len(noted) == 3  # by the first call, the third, and the sixth
    assert all(groups > 0 for groups in noted)


def test_what_no_single_call_computes_and_heads_that_do_not_fit() -> None:
    kernels, dtype = CppKernels(), torch.float32
    whole = make(kernels, dtype)
    stack, head = kernels.prepare_stack(whole), head_of(kernels, dtype, False)
    assert isinstance(stack, NativeStack)
    quantized = kernels.prepare_linear(quantized_weight(OUTPUTS, HIDDEN, 1, 8, 8))
    assert kernels.prepare_greedy(stack, quantized) is None
    assert kernels.prepare_greedy(whole, head) is None
    assert TorchKernels().prepare_greedy(whole, random(OUTPUTS, HIDDEN)) is None
    for other in (head_of(kernels, torch.bfloat16, False), head._replace(inputs=HIDDEN - 2)):
        with pytest.raises(ValueError, match="after a stack of"):
            kernels.prepare_greedy(stack, other)
