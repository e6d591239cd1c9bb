"""Whole forward passes as single calls of the extension `_cpu`: a stack, or a stack and drafts that continue its rows.

The arguments are those of `csrc/module.cpp`. `cpp` has checked the rows and blocks of the batch before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch, Taps
from headrace.compute.kernels import Drafted, Pages
from headrace.compute.kernels.cpp_checks import (
    DTYPES,
    HEAD_NORMS,
    batch_lines,
    check_blocks,
    check_cpu,
    page_words,
    row_lines,
)
from headrace.compute.kernels.native_stack import ALL_KEYS, NativeStack
from headrace.compute.kernels.packed import PackedIntegers, PackedWeight


class StackCall(NamedTuple):
    """The arguments of a stack on a batch. ``out`` [S, hidden] gets its result."""

    arguments: tuple[int | float, ...]
    out: Tensor


class KeptCall(NamedTuple):
    """The arguments that calls of a stack with the same batch and ``pages`` tensors share.

    ``rows`` are the arguments of `check_rows` for each window; blocks that they read must be below ``blocks``.
    ``alive`` owns the memory of the ``arguments``.
    """

    pages: Sequence[Pages]
    rows: tuple[tuple[int, ...], ...]
    blocks: int
    arguments: tuple[int | float, ...]
    alive: tuple[Tensor, ...]


def kept_call(stack: NativeStack, batch: Batch, pages: Sequence[Pages]) -> KeptCall:
    """The shared arguments, after checking the tensors of ``batch``."""
    layers = stack.stack
    tokens, kept = len(batch.tokens), len(batch.logits_indices)
    ids, lines = batch_lines(batch)
    of_rows = row_lines(batch)
    rows, width = of_rows[2].shape
    table = stack.pages_table(pages, page_words)
    num_blocks, block_size = pages[0].keys.shape[:2]
    check_blocks(0, batch.block_size, num_blocks, block_size)
    row_words = (*(line.data_ptr() for line in of_rows), rows, width)
    arguments = (
        stack.embedding,
        stack.table.data_ptr(),
        table.data_ptr(),
        stack.ropes.data_ptr(),
        stack.input_norm,
        len(stack.table),
        ids.data_ptr(),
        *row_words[:3],
        *(line.data_ptr() for line in lines),
        *row_words[3:],
        *(tokens, kept, len(layers.embedding), stack.turns, num_blocks * block_size),
        *_numbers(stack, layers.embedding_scale),
    )
    windows = [ALL_KEYS if window is None else window for window in stack.windows]
    checks = tuple((*row_words, block_size, window, tokens) for window in windows)
    return KeptCall(pages, checks, num_blocks, arguments, (table, ids, *of_rows, *lines))


def stack_call(
    extension: Any,
    stack: NativeStack,
    batch: Batch,
    pages: Sequence[Pages],
    seconds: Tensor | None = None,
) -> StackCall:
    """The call of ``stack`` on ``batch``, whose rows are checked."""
    call: KeptCall | None = batch.kept.get(stack)
    if call is None or call.pages is not pages or not isinstance(pages, tuple):  # a list may have changed
        call = batch.kept[stack] = kept_call(stack, batch, pages)
    for rows in call.rows:
        read = extension.check_rows(*rows)
        if read > call.blocks:
            check_blocks(read, batch.block_size, call.blocks, batch.block_size)
    tokens, kept, hidden = len(batch.tokens), len(batch.logits_indices), stack.hidden
    out = torch.empty((kept, hidden), dtype=stack.stack.dtype)
    arguments = (
        *stack.room(tokens),
        out.data_ptr(),
        0 if seconds is None else seconds.data_ptr(),
        0 if batch.bell is None else batch.bell.address,
        *(_tap_words(batch.taps, tokens, hidden, stack.stack.dtype) if batch.taps else (0, 0, 0)),
        *call.arguments,
    )
    return StackCall(arguments, out)


class Rotation:
    """Rotations float32 [T, 2, N] of a step's tokens, and their words in a table."""

    def __init__(self, table: Tensor) -> None:
        check_cpu(table)
        self.table = table.contiguous()
        if table.dtype != torch.float32 or table.dim() != 3 or table.shape[1] != 2 or table.shape[2] % 2:
            raise ValueError(f"rotations {table.dtype} {list(table.shape)}")
        self._words = np.array([self.table.data_ptr(), table.shape[2]], dtype=np.int64)
        self.address = self._words.ctypes.data


class StepWords(NamedTuple):
    """The arguments that all calls of layers in a step share; ``alive`` owns their memory."""

    rows: tuple[int, ...]
    lines: tuple[int, ...]
    width: tuple[int, ...]
    alive: tuple[Tensor, ...]


def step_words(batch: Batch) -> StepWords:
    """The arguments of a batch for `layers_call`: each token is its own row of states and rotations."""
    found: StepWords | None = batch.kept.get(StepWords)
    if found is None:
        slots, tokens = batch.slot_mapping.contiguous(), len(batch.tokens)
        of_rows = row_lines(batch)
        rows, width = of_rows[2].shape
        places = torch.arange(tokens)
        ids = places.int()
        if slots.dtype != torch.int64 or len(slots) != tokens or not slots.is_cpu:
            raise ValueError(f"slots {slots.dtype} {list(slots.shape)} for {tokens} tokens")
        starts = tuple([line.data_ptr() for line in of_rows])
        lines = (ids.data_ptr(), *starts, places.data_ptr(), slots.data_ptr(), places.data_ptr())
        found = StepWords((*starts, rows, width), lines, (rows, width), (ids, places, slots, *of_rows))
        batch.kept[StepWords] = found
    return found


def layers_call(
    extension: Any,
    stack: NativeStack,
    states: Tensor,
    rotation: Rotation,
    batch: Batch,
    pages: Sequence[Pages],
) -> StackCall:
    """The call of a stack on ``states`` [T, hidden], all with one rotation; ``out`` gets the states after its layers.

    The states stand in the place of the embedding, and each token's rotation in that of a table of positions.
    """
    layers, dtype, tokens = stack.stack, stack.stack.dtype, len(batch.tokens)
    check_cpu(states)
    if states.shape != (tokens, stack.hidden) or states.dtype != dtype or not states.is_contiguous():
        raise ValueError(f"states {states.dtype} {list(states.shape)} for {dtype} [{tokens}, {stack.hidden}]")
    if rotation.table.shape[2] > layers.heads.head_dim or len(rotation.table) != tokens or any(stack.turned):
        raise ValueError(f"rotations {list(rotation.table.shape)} of {tokens} tokens, heads {layers.heads}")
    words = step_words(batch)
    table = stack.pages_table(pages, page_words)
    num_blocks, block_size = pages[0].keys.shape[:2]
    for window in stack.windows:
        seen = ALL_KEYS if window is None else window
        read = extension.check_rows(*words.rows, block_size, seen, tokens)
        check_blocks(read, batch.block_size, num_blocks, block_size)
    out, normed = states.new_empty((2, tokens, stack.hidden))  # in one memory, which lives as long as `out`
    count = len(stack.table)
    arguments = (
        *stack.room(tokens),
        normed.data_ptr(),
        0,
        0 if batch.bell is None else batch.bell.address,
        *(out.data_ptr(), stack.after.data_ptr(), 1),
        *(
            states.data_ptr(),
            stack.table.data_ptr(),
            table.data_ptr(),
            rotation.address,
            stack.input_norm,
            count,
        ),
        *words.lines,
        *words.width,
        *(tokens, tokens, tokens, tokens, num_blocks * block_size),
        *_numbers(stack, 1.0),
    )
    return StackCall(arguments, out)


def _numbers(stack: NativeStack, embedding_scale: float) -> tuple[int | float, ...]:
    """The arguments at the end of every call of a stack, whatever its batch."""
    layers, dtype = stack.stack, stack.stack.dtype
    return (
        stack.hidden,
        dtype.itemsize,
        *layers.heads,
        DTYPES[dtype],
        layers.activation != "silu",
        HEAD_NORMS[layers.head_norm],
        layers.eps,
        layers.scale,
        layers.softcap or 0.0,
        embedding_scale,
    )


def _tap_words(taps: Taps, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[int, int, int]:
    states, layers = taps
    check_cpu(states)
    if layers.dtype != np.int64 or not layers.flags.c_contiguous:
        raise ValueError(f"tapped layers must be int64 and contiguous, not {layers.dtype}")
    shape = (tokens, len(layers) * hidden)
    if states.shape != shape or states.dtype != dtype or not states.is_contiguous():
        raise ValueError(f"hidden states {states.dtype} {list(states.shape)} of {dtype} {list(shape)}")
    return states.data_ptr(), layers.ctypes.data, len(layers)


def run_drafts(
    extension: Any,
    level: int,
    stack: NativeStack,
    head: PackedWeight | PackedIntegers,
    call: StackCall,
    most: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    least: float,
    block_size: int,
) -> Drafted:
    """See `Kernels.draft`."""
    kept, longest = len(most), int(most.max(initial=0))
    if head.panel != stack.panel:
        raise ValueError(f"a head in panels of {head.panel} after a stack in panels of {stack.panel}")
    if len(call.out) != kept:
        raise ValueError(f"{kept} drafts for {len(call.out)} wanted positions")
    dtype = stack.stack.dtype
    if isinstance(head, PackedWeight) and head.dtype != dtype:
        raise ValueError(f"a head of {head.dtype} after a stack of {dtype}")
    logits = torch.empty((kept, head.outputs), dtype=dtype)
    tokens, probabilities = (
        np.zeros((kept, longest), dtype=np.int64),
        np.zeros((kept, longest), dtype=np.float32),
    )
    counts, computed = np.zeros(kept, dtype=np.int64), np.zeros(kept, dtype=np.int64)
    extension.drafts(
        level,
        *call.arguments,
        stack.head_words(head),
        np.ascontiguousarray(most, dtype=np.int64),
        logits.data_ptr(),
        *(tokens, probabilities, counts, computed),
        longest,
        block_size,
        least,
    )
    return Drafted(tokens, probabilities, counts, computed)
