"""All layers in one call are the same layers call by call, to the last bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.compute.batch import Batch, Features, StepInterrupt, StepInterrupted, Taps
from headrace.compute.kernels import HeadNorm, HeadShape, KernelsUnavailable, Pages
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Feed, Mixture, Mlp
from headrace.compute.kernels.measure import TimedKernels, weight_bytes
from headrace.compute.kernels.native_calls import NativeStack, Rotation
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.kernels.stack import Stack, apply, rotations_of
from tests.compute.kernels.stacks import (
    AXES,
    BLOCK,
    CPU,
    DECODING,
    HIDDEN,
    MIXED,
    POSITIONS,
    PROMPTS,
    ROTARY,
    VOCAB,
    linear,
    make,
    of_many_shapes,
    pages_for,
    pages_of_many_shapes,
    random,
    rotations,
    with_experts,
    with_images,
    with_joint_rows,
)
from tests.oracle.harness import pack

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W8A8"])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_layers_of_many_shapes_in_one_call(level: str, kind: str, page_dtype: torch.dtype) -> None:
    kernels, dtype = CppKernels(level), torch.bfloat16 if page_dtype == torch.bfloat16 else torch.float32
    stack = of_many_shapes(kernels, dtype, kind)
    prepared = kernels.prepare_stack(stack)
    assert isinstance(prepared, NativeStack)
    one, other = pages_of_many_shapes(page_dtype), pages_of_many_shapes(page_dtype)
    for batch in (PROMPTS, MIXED, DECODING):
        at_once, call_by_call = kernels.run_stack(prepared, batch, one), apply(kernels, stack, batch, other)
        assert torch.equal(at_once, call_by_call)
    assert all(each.keys.any() for each in one)


def test_scaled_layers_in_one_call() -> None:
    kernels = CppKernels()
    stack = of_many_shapes(kernels, torch.float32, scale=0.75)
    one, other, usual = (pages_of_many_shapes(torch.float32) for _ in range(3))
    at_once = kernels.run_stack(kernels.prepare_stack(stack), MIXED, one)
    torch.testing.assert_close(at_once, apply(kernels, stack, MIXED, other), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(
        at_once, apply(kernels, of_many_shapes(kernels, torch.float32), MIXED, usual), rtol=1e-2
    )


def test_a_gate_without_inputs_is_refused() -> None:
    kernels = CppKernels()
    stack = replace(of_many_shapes(kernels, torch.float32), per_layer=None)
    with pytest.raises(ValueError, match="a gate for an input that there is not"):
        kernels.prepare_stack(stack)


KEPT = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
]
"""The dtypes of activations and of the pages beside them."""


def both(
    level: str, dtype: torch.dtype, page_dtype: torch.dtype, kind: str, rich: bool, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """What a stack gives for prompts, a mixed batch and decoding, in one call and call by call; and its pages last."""
    kernels = CppKernels(level)
    stack = make(kernels, dtype, kind, rich, **options)
    prepared = kernels.prepare_stack(stack)
    assert isinstance(prepared, NativeStack)
    one, other = pages_for(page_dtype), pages_for(page_dtype)
    results = []
    for batch in (PROMPTS, MIXED, DECODING):
        at_once = kernels.run_stack(prepared, batch, one)
        results.append((at_once, apply(kernels, stack, batch, other)))
    for mine, theirs in zip(one, other, strict=True):
        results += [
            (a, b) for a, b in zip(mine[:4], theirs[:4], strict=True) if a is not None and b is not None
        ]
    return results


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W8A8", "W4A16"])
@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize(("dtype", "page_dtype"), KEPT)
def test_one_call_is_all_calls(
    level: str, dtype: torch.dtype, page_dtype: torch.dtype, kind: str, rich: bool
) -> None:
    results = both(level, dtype, page_dtype, kind, rich)
    assert [len(at_once) for at_once, _ in results[:3]] == [0, 3, 2]
    for at_once, one_by_one in results:
        assert torch.equal(at_once, one_by_one)


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("level", ["torch", *LEVELS])
def test_a_table_in_bfloat16_is_read_for_states_in_float32(level: str, rich: bool) -> None:
    kernels = TorchKernels() if level == "torch" else CppKernels(level)
    stack = replace(make(kernels, torch.float32, rich=rich), axes=(None, None))
    narrow = stack.embedding.bfloat16()
    for batch in (PROMPTS, MIXED, with_images(MIXED, torch.float32)):
        results = []
        for table in (narrow, narrow.float()):
            prepared = kernels.prepare_stack(replace(stack, embedding=table))
            assert level == "torch" or isinstance(prepared, NativeStack)
            results.append(kernels.run_stack(prepared, batch, pages_for(torch.float32)))
        assert torch.equal(*results)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W4A16"])
@pytest.mark.parametrize("head_norm", ["projection", "rotated"])
def test_norms_of_other_places_in_one_call_too(level: str, kind: str, head_norm: HeadNorm) -> None:
    for dtype, page_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.int8)):
        results = both(level, dtype, page_dtype, kind, True, head_norm=head_norm, before=False)
        for at_once, one_by_one in results:
            assert torch.equal(at_once, one_by_one)
        usual = both(level, dtype, page_dtype, kind, True)
        assert not torch.equal(results[1][0], usual[1][0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head_norm", ["head", "projection", "rotated"])
@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize(
    "heads",
    [HeadShape(2, 1, 64), pytest.param(HeadShape(4, 2, 128), marks=pytest.mark.slow), HeadShape(1, 1, 96)],
)
@pytest.mark.parametrize(("dtype", "page_dtype"), KEPT)
def test_outputs_that_go_on_at_once_are_those_that_are_written_first(
    level: str, dtype: torch.dtype, page_dtype: torch.dtype, heads: HeadShape, rich: bool, head_norm: HeadNorm
) -> None:
    """Heads and gates of whole panels, which long and short prompts and decoding rows finish with their weights."""
    kernels = CppKernels(level)
    stack = make(kernels, dtype, "plain", rich, heads, inner=128, positions=256, head_norm=head_norm)
    lengths, contexts = [1, 1, 170, 33, 20], [40, 17, 170, 33, 25]
    blocks = iter(torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist())
    tables = [[next(blocks) for _ in range(-(-each // 16))] for each in contexts]
    before = [context - length for context, length in zip(contexts, lengths, strict=True)]
    tokens = [i % VOCAB for i in range(sum(lengths))]
    batch = pack(tokens, before, lengths, tables, [0, 171, 224], 16, CPU)
    one, other = pages_for(page_dtype, heads, 40, 16), pages_for(page_dtype, heads, 40, 16)
    at_once = kernels.run_stack(kernels.prepare_stack(stack), batch, one)
    assert torch.equal(at_once, apply(kernels, stack, batch, other))
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine[:4], theirs[:4], strict=True):
            assert a is b is None or torch.equal(a, b)


WINDOWED = (
    (PROMPTS, [[3, 8, 0], [10, 0, 0]]),
    (MIXED, [[3, 8, 0], [10, 11, 0], [0, 0, 0]]),
    (DECODING, [[1, 8, 0], [4, 11, 0]]),  # the window has passed the first blocks, which others have now
)
"""Batches with the tables of a second group; only the end of a window of 3 reaches a place."""


def with_window(batch: Batch, table: list[list[int]]) -> Batch:
    """The batch with a group of window layers, whose blocks are those of ``table``."""
    starts = [end - length for end, length in zip(batch.contexts, batch.lengths, strict=True)]
    own = pack(batch.tokens.tolist(), starts, [*batch.lengths], table, [], BLOCK, CPU)
    return replace(batch, windows=(replace(own, logits_indices=batch.logits_indices),))


def grouped_pages(dtype: torch.dtype) -> tuple[Pages, ...]:
    """Two layers of the first group, and one of a second group whose blocks are in the tensors of the first layer."""
    first, _, last = pages_for(dtype)
    return first, first._replace(group=1), last


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W4A16"])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_layers_of_a_window_group_have_their_own_blocks_in_one_call(
    level: str, kind: str, page_dtype: torch.dtype
) -> None:
    kernels = CppKernels(level)
    stack = make(kernels, torch.float32 if page_dtype == torch.float32 else torch.bfloat16, kind, rich=True)
    prepared = kernels.prepare_stack(stack)
    assert isinstance(prepared, NativeStack)
    one, other, alone = grouped_pages(page_dtype), grouped_pages(page_dtype), pages_for(page_dtype)
    for batch, table in WINDOWED:
        grouped = with_window(batch, table)
        at_once = kernels.run_stack(prepared, grouped, one)
        assert torch.equal(at_once, apply(kernels, stack, grouped, other))
        assert torch.equal(at_once, kernels.run_stack(prepared, batch, alone))
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine[:4], theirs[:4], strict=True):
            assert a is b is None or torch.equal(a, b)
    for ours, theirs in ((8, 2), (11, 5)):  # the same content in other blocks
        assert one[1].keys[ours].any()
        assert torch.equal(one[1].keys[ours], alone[1].keys[theirs])


def test_a_batch_without_the_tables_of_a_group_is_refused() -> None:
    kernels = CppKernels()
    stack = make(kernels, torch.float32, rich=True)
    pages = grouped_pages(torch.float32)
    with pytest.raises(ValueError, match="pages of group 1, but the batch has tables of 1"):
        kernels.run_stack(kernels.prepare_stack(stack), MIXED, pages)
    beyond = with_window(MIXED, [[3, 99, 0], [10, 11, 0], [0, 0, 0]])
    with pytest.raises(IndexError, match="99"):
        kernels.run_stack(kernels.prepare_stack(stack), beyond, pages)


def test_the_states_differ_from_layer_to_layer_and_from_token_to_token() -> None:
    (_, _), (mixed, _), (decoding, _), *pages = both(
        LEVELS[0], torch.float32, torch.float32, "plain", rich=True
    )
    assert len({tuple(row) for row in (*mixed.tolist(), *decoding.tolist())}) == 5
    assert not torch.equal(pages[0][0], pages[2][0])


def test_weights_that_the_extension_does_not_read_are_run_call_by_call() -> None:
    kernels = CppKernels()
    stack = make(kernels, torch.float16)
    prepared = kernels.prepare_stack(stack)
    assert prepared is stack
    out = kernels.run_stack(prepared, PROMPTS, pages_for(torch.float16))
    assert out.shape == (0, HIDDEN)


def test_timed_kernels_time_each_call_and_compute_the_same() -> None:
    kernels = CppKernels()
    prepared = kernels.prepare_stack(make(kernels, torch.float32))
    timed = TimedKernels(kernels)
    results = [each.run_stack(prepared, MIXED, pages_for(torch.float32)) for each in (kernels, timed)]
    assert torch.equal(*results)
    assert all(timed.totals[part] > 0 for part in ("linear", "attention", "elementwise"))


def test_the_reference_runs_layers_call_by_call() -> None:
    kernels = TorchKernels()
    stack = make(kernels, torch.float32)
    pages = pages_for(torch.float32)
    out = kernels.run_stack(kernels.prepare_stack(stack), MIXED, pages)
    expected = apply(kernels, stack, MIXED, pages_for(torch.float32))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernels", [CppKernels(), TorchKernels()], ids=type)
def test_an_interrupt_stops_a_forward_pass_whose_writes_are_repeated(kernels: Any) -> None:
    stack = kernels.prepare_stack(make(kernels, torch.float32))
    interrupt, pages = StepInterrupt(), pages_for(torch.float32)
    batch = replace(MIXED, interrupt=interrupt)
    interrupt.set()
    with pytest.raises(StepInterrupted):
        kernels.run_stack(stack, batch, pages)
    interrupt.clear()
    whole = kernels.run_stack(stack, batch, pages)
    assert torch.equal(whole, kernels.run_stack(stack, MIXED, pages_for(torch.float32)))


def test_an_interrupt_is_checked_between_two_layers() -> None:
    """Rung while a pass of 12,000 layers is under way."""
    kernels = CppKernels()
    stack = make(kernels, torch.float32)
    stack = kernels.prepare_stack(replace(stack, layers=stack.layers * 4_000))
    pages = pages_for(torch.float32) * 4_000
    interrupt = StepInterrupt()
    ringing = threading.Timer(0.002, interrupt.set)
    ringing.start()
    with pytest.raises(StepInterrupted):
        kernels.run_stack(stack, replace(MIXED, interrupt=interrupt), pages)
    ringing.join()


def test_passes_of_two_threads_do_not_share_working_memory() -> None:
    kernels = CppKernels()
    prepared = kernels.prepare_stack(make(kernels, torch.float32, positions=600))
    long = pack([index % VOCAB for index in range(500)], [0], [500], [list(range(125))], [499], BLOCK, CPU)
    batches = [long, MIXED]

    def passes(batch: Batch, times: int) -> list[Tensor]:
        pages = pages_for(torch.float32, blocks=125)
        return [kernels.run_stack(prepared, replace(batch, kept={}), pages) for _ in range(times)]

    expected = [passes(batch, 1)[0] for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(passes, batch, times) for batch, times in zip(batches, (10, 300), strict=True)]
        for each, right in zip(found, expected, strict=True):
            assert all(torch.equal(one, right) for one in each.result())


def run(batch: Batch = MIXED, pages: Sequence[Pages] | None = None, **changed: Any) -> Tensor:
    kernels = CppKernels()
    stack = replace(make(kernels, torch.float32), **changed)
    return kernels.run_stack(kernels.prepare_stack(stack), batch, pages or pages_for(torch.float32))


@pytest.mark.parametrize(
    ("changed", "error", "reported"),
    [
        ({"embedding": torch.zeros(VOCAB, HIDDEN + 1)}, ValueError, "24, 49"),
        ({"embedding": torch.zeros(VOCAB, HIDDEN + 1).bfloat16()}, ValueError, "24, 49"),
        ({"ropes": (torch.zeros(POSITIONS, 16),) * 2}, ValueError, "rotations"),
        ({"ropes": (torch.zeros(POSITIONS, 2, 18),) * 2}, ValueError, "rotations"),
        (
            {"ropes": (rotations(5)[0], rotations(POSITIONS)[1])},
            IndexError,
            r"positions\[0\] is 5; there are 5",
        ),
        ({"batch": replace(MIXED, tokens=MIXED.tokens + 17)}, IndexError, r"tokens\[7\] is 24; there are 24"),
        ({"batch": replace(MIXED, tokens=MIXED.tokens - 1)}, IndexError, r"tokens\[0\] is -1"),
        ({"batch": replace(MIXED, tokens=MIXED.tokens.long())}, ValueError, "tokens torch.int64"),
        ({"batch": replace(MIXED, positions=MIXED.positions[:7])}, ValueError, "7 positions"),
        ({"pages": pages_for(torch.float32)[:2]}, ValueError, "2 pages"),
        (
            {"pages": [Pages(*(part[:9] for part in each[:2])) for each in pages_for(torch.float32)]},
            IndexError,
            "9",
        ),
        ({"batch": replace(MIXED, slot_mapping=MIXED.slot_mapping + 40)}, IndexError, "slots"),
        ({"batch": replace(MIXED, slot_mapping=MIXED.slot_mapping.int())}, ValueError, "slots"),
        ({"batch": replace(MIXED, logits_indices=torch.tensor([3, 0]))}, IndexError, "ascend"),
        ({"batch": replace(MIXED, logits_indices=torch.tensor([3, 8]))}, IndexError, "ascend"),
        ({"scale": 0.0}, ValueError, "multiplied by 0.0"),
        ({"heads": HeadShape(3, 2, 16)}, ValueError, "3 heads for 2"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], error: type[Exception], reported: str) -> None:
    assert run().shape == (3, HIDDEN)
    with pytest.raises(error, match=reported):
        run(**changed)


@pytest.mark.parametrize("part", ["output", "mlp_norm"])
def test_a_weight_that_does_not_fit_is_refused_at_once(part: str) -> None:
    kernels = CppKernels()
    stack = make(kernels, torch.float32)
    wrong = {
        "output": linear(kernels, HIDDEN, HIDDEN, torch.float32, "plain", False),
        "mlp_norm": torch.ones(HIDDEN + 1),
    }
    layers = (replace(stack.layers[0], **{part: wrong[part]}), *stack.layers[1:])
    with pytest.raises(ValueError, match=r"linear layer|a norm, bias or table"):
        kernels.prepare_stack(replace(stack, layers=layers))


def test_pages_in_a_list_may_be_others_at_the_next_call() -> None:
    kernels = CppKernels()
    stack = kernels.prepare_stack(make(kernels, torch.float32))
    pages = list(pages_for(torch.float32))
    kernels.run_stack(stack, PROMPTS, pages)
    pages[:] = pages_for(torch.float32)
    kernels.run_stack(stack, PROMPTS, pages)
    assert all(each.keys.any() for each in pages)


def test_a_stack_that_another_level_prepared_is_refused() -> None:
    kernels = CppKernels()
    stacks = [CppKernels(level).prepare_stack(make(CppKernels(level), torch.float32)) for level in LEVELS]
    for stack in stacks:
        assert isinstance(stack, NativeStack)
        if stack.panel != stacks[0].panel:
            with pytest.raises(ValueError, match="for another level"):
                kernels.run_stack(stack, PROMPTS, pages_for(torch.float32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16])
def test_joint_rows_in_one_call(level: str, page_dtype: torch.dtype) -> None:
    kernels = CppKernels(level)
    for batch in (PROMPTS, MIXED):
        pages = [pages_for(page_dtype) for _ in range(3)]
        stack, given = with_joint_rows(make(kernels, page_dtype), batch)
        at_once = kernels.run_stack(kernels.prepare_stack(stack), given, pages[0])
        assert torch.equal(at_once, apply(kernels, stack, given, pages[1]))
        apply(kernels, stack, batch, pages[2])
        for layer in range(3):
            assert torch.equal(pages[0][layer].keys, pages[1][layer].keys)
            assert torch.equal(pages[0][layer].keys, pages[2][layer].keys) == (layer < 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W4A16"])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16])
def test_images_in_one_call(level: str, kind: str, page_dtype: torch.dtype) -> None:
    kernels = CppKernels(level)
    stack = replace(make(kernels, page_dtype, kind, rich=True), axes=AXES)
    prepared = kernels.prepare_stack(stack)
    for batch in (PROMPTS, MIXED):
        pages = [pages_for(page_dtype) for _ in range(4)]
        given = with_images(batch, page_dtype)
        at_once = kernels.run_stack(prepared, given, pages[0])
        assert torch.equal(at_once, apply(kernels, stack, given, pages[1]))
        for mine, theirs in zip(pages[0], pages[1], strict=True):
            assert torch.equal(mine.keys, theirs.keys)
        for number, other in enumerate((replace(given, axes=None), replace(given, features=None))):
            kernels.run_stack(prepared, replace(other, kept={}), pages[2 + number])
            assert not torch.equal(pages[2 + number][2].keys, pages[0][2].keys)


def test_rotations_by_three_positions_are_those_of_each_feature() -> None:
    kernels = TorchKernels()
    stack = replace(make(kernels, torch.float32), axes=(AXES[0], None))
    batch = with_images(MIXED, torch.float32)
    assert batch.axes is not None
    first, second = rotations_of(stack, batch)
    for token in range(len(batch.tokens)):
        for feature in range(ROTARY[0]):
            at = batch.axes[feature % 3, token]
            assert torch.equal(first[token, :, feature], stack.ropes[0][at, :, feature])
        assert torch.equal(second[token], stack.ropes[1][batch.positions[token]])


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (with_images(MIXED, torch.float32, layers=3), "states of images"),
        (with_images(MIXED, torch.bfloat16), "a norm, bias or table|bfloat16|dtype"),
        (replace(MIXED, features=Features(torch.tensor([8]), random(1, HIDDEN), random(1, 1, HIDDEN))), "8"),
    ],
)
def test_images_that_do_not_fit_are_refused(batch: Batch, reason: str) -> None:
    kernels = CppKernels()
    stack = kernels.prepare_stack(replace(make(kernels, torch.float32), axes=AXES))
    with pytest.raises((IndexError, ValueError, RuntimeError), match=reason):
        kernels.run_stack(stack, replace(batch, kept={}), pages_for(torch.float32))


def tapping(layers: list[int], dtype: torch.dtype = torch.float32) -> Batch:
    tokens = len(MIXED.tokens)
    taps = Taps(torch.full((tokens, len(layers) * HIDDEN), 7.0, dtype=dtype), np.array(layers))
    return replace(MIXED, logits_indices=torch.arange(tokens), taps=taps)


def states_of(batch: Batch) -> Tensor:
    assert batch.taps is not None
    return batch.taps.states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_before_layers_are_those_of_the_calls_one_by_one(dtype: torch.dtype) -> None:
    kernels, layers = CppKernels(), [2, 0, 3]
    stack = make(kernels, dtype, rich=True)
    one, other = tapping(layers, dtype), tapping(layers, dtype)
    out = kernels.run_stack(kernels.prepare_stack(stack), one, pages_for(dtype))
    assert torch.equal(out, apply(kernels, stack, other, pages_for(dtype)))
    assert torch.equal(states_of(one), states_of(other))
    second, embedded, last = states_of(one).split(HIDDEN, 1)
    assert torch.equal(embedded, (stack.embedding[MIXED.tokens] * stack.embedding_scale).to(dtype))
    assert torch.equal(kernels.rms_norm(last, stack.layers[-1].following_norm, stack.eps), out)
    assert not torch.equal(second, last)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (tapping([4]), "hidden states before layer 4 of 3"),
        (tapping([-1]), "hidden states before layer -1 of 3"),
        (
            replace(tapping([3]), logits_indices=torch.tensor([0, 3])),
            "layer 3 of 3, with 2 of 8 tokens wanted",
        ),
        (replace(tapping([1]), taps=Taps(torch.zeros(8, HIDDEN + 1), np.array([1]))), "hidden states"),
        (replace(tapping([1]), taps=tapping([1], torch.bfloat16).taps), "hidden states torch.bfloat16"),
    ],
)
def test_states_that_a_pass_cannot_return_are_refused(batch: Batch, reason: str) -> None:
    kernels = CppKernels()
    stack = kernels.prepare_stack(make(kernels, torch.float32))
    with pytest.raises((IndexError, ValueError), match=reason):
        kernels.run_stack(stack, batch, pages_for(torch.float32))


def _of_one_rotation(stack: Stack) -> Stack:
    return replace(stack, layers=tuple(replace(layer, rope=0) for layer in stack.layers))


@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_layers_between_states_are_those_of_the_stack(page_dtype: torch.dtype) -> None:
    """Three layers, in one call and as one and two, which share their working memory."""
    kernels, dtype, last = CppKernels(), torch.bfloat16, len(make(CppKernels(), torch.bfloat16).layers)
    stack = _of_one_rotation(make(kernels, dtype, rich=True))
    whole = tapping([0, 1, last], dtype)
    pages = [pages_for(page_dtype) for _ in range(3)]
    kernels.run_stack(kernels.prepare_stack(stack), whole, pages[0])
    embedded, first, after = (part.contiguous() for part in torch.split(states_of(whole), HIDDEN, 1))
    rotation = Rotation(stack.ropes[0][MIXED.positions])

    def part(begin: int, end: int) -> NativeStack:
        norm = stack.layers[begin - 1].following_norm if begin else stack.input_norm
        prepared = kernels.prepare_layers(replace(stack, layers=stack.layers[begin:end], input_norm=norm))
        assert prepared is not None
        return prepared

    assert torch.equal(kernels.run_layers(part(0, 3), embedded, rotation, MIXED, pages[1]), after)
    one, rest = part(0, 1), part(1, 3)
    assert torch.equal(kernels.run_layers(one, embedded, rotation, MIXED, pages[2][:1]), first)
    assert torch.equal(kernels.run_layers(rest, first, rotation, MIXED, pages[2][1:]), after)
    for other in pages[1:]:
        for mine, theirs in zip(pages[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine[:4], theirs[:4], strict=True) if a is not None)


def test_layers_that_do_not_fit_are_refused() -> None:
    kernels = CppKernels()
    stack = make(kernels, torch.float32)
    several = kernels.prepare_layers(make(kernels, torch.float32, rich=True))
    prepared = kernels.prepare_layers(_of_one_rotation(stack))
    assert prepared is not None
    assert several is not None
    states, turned = torch.zeros(8, HIDDEN), stack.ropes[0][MIXED.positions]
    pages, rotation = pages_for(torch.float32), Rotation(turned)
    with pytest.raises(ValueError, match="rotations"):
        kernels.run_layers(several, states, rotation, MIXED, pages)
    with pytest.raises(ValueError, match="rotations"):
        kernels.run_layers(prepared, states, Rotation(turned[:7]), MIXED, pages)
    with pytest.raises(ValueError, match="rotations"):
        Rotation(turned.double())
    for wrong in (states[:7], states.bfloat16(), states[:, :40]):
        with pytest.raises(ValueError, match="states"):
            kernels.run_layers(prepared, wrong, rotation, MIXED, pages)
    with pytest.raises(ValueError, match="pages"):
        kernels.run_layers(prepared, states, rotation, MIXED, pages[:2])
    with pytest.raises(IndexError):
        kernels.run_layers(prepared, states, rotation, MIXED, pages_for(torch.float32, blocks=5))
    interrupt = StepInterrupt()
    interrupt.set()
    with pytest.raises(StepInterrupted):
        kernels.run_layers(prepared, states, rotation, replace(MIXED, interrupt=interrupt), pages)


@pytest.mark.parametrize("level", LEVELS)
def test_layers_with_experts_are_part_of_the_one_call(level: str) -> None:
    kernels = CppKernels(level)
    dtype = torch.bfloat16
    stack = with_experts(kernels, make(kernels, dtype))
    prepared = kernels.prepare_stack(stack)
    assert isinstance(prepared, NativeStack)
    one, other = pages_for(dtype), pages_for(dtype)
    for batch in (PROMPTS, MIXED, DECODING):
        at_once = kernels.run_stack(prepared, batch, one)
        assert torch.equal(at_once, apply(kernels, stack, batch, other))
    first, second, last = stack.layers
    assert isinstance(first.feed, Mixture)
    few = first.feed._replace(each=kernels.prepare_experts([Mlp(*second.feed)], dtype))
    with pytest.raises(ValueError, match="1 experts for"):
        kernels.prepare_stack(replace(stack, layers=(replace(first, feed=few), second, last)))


def test_timed_kernels_count_the_experts_that_tokens_have() -> None:
    kernels = CppKernels()
    stack = with_experts(kernels, make(kernels, torch.bfloat16))
    at_once, apart = TimedKernels(kernels), TimedKernels(kernels)
    one = at_once.run_stack(kernels.prepare_stack(stack), DECODING, pages_for(torch.bfloat16))  # type: ignore[arg-type]
    assert torch.equal(one, apart.run_stack(stack, DECODING, pages_for(torch.bfloat16)))
    linears = sum(weight_bytes(each.weight) for layer in stack.layers for each in layer.linears)
    assert linears < at_once.totals["linear bytes"] == apart.totals["linear bytes"]
    assert at_once.totals["linear products"] == apart.totals["linear products"]
    loop = replace(stack, layers=tuple(replace(layer, feed=_loop(layer.feed)) for layer in stack.layers))
    looped = TimedKernels(kernels)
    looped.run_stack(loop, DECODING, pages_for(torch.bfloat16))
    for part in ("linear bytes", "linear products"):
        assert looped.totals[part] == at_once.totals[part]


def _loop(feed: Feed) -> Feed:
    """The same experts, not prepared for one call."""
    return feed._replace(each=feed.each.each) if isinstance(feed, Mixture) else feed
