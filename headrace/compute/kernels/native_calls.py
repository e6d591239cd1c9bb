"""Whole forward passes as single calls of the extension `_cpu`: a stack, or a stack and drafts that continue its rows.

The arguments are those of `csrc/module.cpp`. `cpp` has checked the rows and blocks of the batch before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch, Features, Taps
from headrace.compute.device import huge_memory
from headrace.compute.kernels import Drafted, HeadShape, Pages
from headrace.compute.kernels.cpp_checks import (
    ACTIVATIONS,
    ALL_KEYS,
    DTYPES,
    HEAD_NORMS,
    batch_lines,
    check_blocks,
    check_cpu,
    joint_address,
    page_words,
    row_lines,
)
from headrace.compute.kernels.experts import Mixture, Mlp
from headrace.compute.kernels.mixers import StepRows
from headrace.compute.kernels.native_adapters import AdapterCall
from headrace.compute.kernels.native_experts import (
    NativeExperts,
    NativeRouter,
    Weight,
    address,
    is_native,
    linear_words,
)
from headrace.compute.kernels.native_mixers import NativeMixer, StepLines, state_words, step_lines
from headrace.compute.kernels.packed import PackedIntegers, PackedWeight
from headrace.compute.kernels.recurrent import RecurrentStates
from headrace.compute.kernels.stack import Layer, Linear, Stack, embedded, rotations_of

# A stack as tables of words, so that the extension runs it in one call.
#
# The Python time of a step then does not depend on layers or rows, and the interpreter lock is released once per
# forward pass instead of several times per layer. The words of the tables are defined in `csrc/stack.h`.

PageWords = Callable[[Pages, int, int, torch.dtype], tuple[int, ...]]

Words = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_LINEAR_WORDS, _PAGE_WORDS, _STATE_WORDS = 12, 8, 4
_ROOMS = 10
"""Parts of the working memory of every stack; two more are for states ahead of those that stay."""


class Room:
    """The working memory of passes, one at a time: a thread holds ``lock`` from `take` to the end of the pass.

    An embedding may be computed beside a step that runs on the runner's thread.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._parts: list[Tensor] = []
        self.words: tuple[int, ...] = ()

    def take(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The addresses of parts of at least as many bytes, kept from pass to pass, as large as the largest need."""
        if len(self._parts) != len(sizes) or any(
            len(part) < size for part, size in zip(self._parts, sizes, strict=True)
        ):
            old = [len(part) for part in self._parts] or [0] * len(sizes)
            self._parts = [huge_memory(max(pair)) for pair in zip(sizes, old, strict=True)]
            self.words = tuple([part.data_ptr() for part in self._parts])
        return self.words


class NativeStack:
    """``stack``, its ``table`` int64 [layers, words] and ``ropes`` int64 [ropes, 2], with weights in panels of
    ``panel``.

    `pages_table` caches the table of the last keys and values. Stacks that run one after another share a ``room``.
    ``turns`` positions have rotations, and ``turned`` is the rotation of each layer. ``after`` int64 [1] is the number
    of layers. Per token, ``hidden`` elements pass between layers, ``attended`` come from attention, and at most
    ``wide`` and ``narrow`` exist before and after the rotation or the gates' product.

    Raises:
        ValueError: a weight does not fit the others.
    """

    def __init__(self, stack: Stack, room: Room | None = None) -> None:
        attending = [layer for layer in stack.layers if layer.attends]
        shapes = [stack.heads_of(layer) for layer in attending]
        for heads, kv_heads, _ in shapes:
            if heads % kv_heads or not stack.scale > 0:
                raise ValueError(f"{heads} heads for {kv_heads} of keys, scores multiplied by {stack.scale}")
        mixtures = [layer.feed for layer in stack.layers if isinstance(layer.feed, Mixture)]
        panels = {linear.weight.panel for layer in stack.layers for linear in layer.linears}
        panels |= {part.panel for mixture in mixtures for part in mixture[:2]}
        if len(panels) != 1:
            raise ValueError(f"weights in panels of {sorted(panels)}, which are those of several levels")
        (self.panel,) = panels
        self.stack = stack
        self._room = room or Room()
        self.lock = self._room.lock
        self.hidden = stack.layers[0].qkv.weight.inputs
        self._tables: list[Words] = []  # of input gates and mixers, which own their memory
        self.table = torch.tensor([self._layer_words(layer) for layer in stack.layers], dtype=torch.int64)
        table = stack.embedding
        self.embedding = address(table, table.dtype, len(table) * self.hidden)
        self.input_norm = address(stack.input_norm, torch.float32, self.hidden)
        self.turned = [layer.rope for layer in stack.layers]
        self.after = torch.tensor([len(stack.layers)])
        self.turns = min(len(table) for table in stack.ropes)
        self.ropes = torch.tensor([rope_words(table) for table in stack.ropes], dtype=torch.int64)
        for layer, shape in zip(attending, shapes, strict=True):
            if not 0 <= layer.rope < len(stack.ropes):
                raise ValueError(f"a layer has the rotation {layer.rope} of {len(stack.ropes)}")
            if stack.ropes[layer.rope].shape[-1] > shape.head_dim:
                raise ValueError(
                    f"rotations {list(stack.ropes[layer.rope].shape)} of heads of {shape.head_dim}"
                )
        self.windows = tuple({layer.window for layer in attending})
        self._pages: Sequence[Pages] = ()
        self._pages_table = torch.empty(0, dtype=torch.int64)
        self.groups = torch.empty(0, dtype=torch.int64)  # of each layer, of the same pages
        self._states: tuple[Tensor | None, Tensor] = None, torch.empty(0, dtype=torch.int64)
        self.state_slots = 0
        self._head: tuple[Weight | None, Words] = None, np.zeros(0, dtype=np.int64)
        self._size_room()

    def _size_room(self) -> None:
        """The working memory that a token needs."""
        stack = self.stack
        mixtures = [layer.feed for layer in stack.layers if isinstance(layer.feed, Mixture)]
        inner = max(
            [layer.feed.down.weight.inputs for layer in stack.layers if isinstance(layer.feed, Mlp)],
            default=0,
        )
        columns = max([mixture.router.routing.columns for mixture in mixtures], default=1)
        per_layer = 0 if stack.per_layer is None else stack.per_layer.width
        firsts = [(layer.qkv, *(layer.beside or ())[:1]) for layer in stack.layers]
        first = max(each.weight.outputs for each in chain.from_iterable(firsts))
        attended = max(layer.output.weight.inputs for layer in stack.layers)
        beside = [layer.gates.weight.outputs for layer in stack.layers if layer.gates is not None]
        beside += [layer.beside.output.weight.inputs for layer in stack.layers if layer.beside is not None]
        either = max(self.hidden, attended)
        wide, narrow = max(first, 2 * inner, per_layer), max(attended, inner, per_layer)
        widths = (self.hidden, either, either, wide, narrow)
        self._token_bytes = [width * stack.dtype.itemsize for width in widths]
        self._token_bytes += [columns * size for size in (torch.int64.itemsize, torch.float32.itemsize)]
        self._token_bytes.append(max(beside, default=0) * stack.dtype.itemsize)
        mixers: list[NativeMixer] = [layer.mixer for layer in stack.layers if layer.mixer is not None]
        size = torch.float32.itemsize
        self._convolved_bytes = size * max([mixer.channels for mixer in mixers], default=0)
        self._mixed_bytes = size * max([mixer.inner for mixer in mixers if mixer.spaced], default=0)
        shapes = [(*mixer.shapes, (0,))[:2] for mixer in mixers] or [((0,), (0,))]
        self._state_bytes = [size * max(map(math.prod, each)) for each in zip(*shapes, strict=True)]

    def pages_table(self, pages: Sequence[Pages], words: PageWords) -> Tensor:
        """``words`` of each layer's pages, int64 [layers, words]; computed once for pages that stay the same."""
        if pages is not self._pages or not isinstance(pages, tuple):  # a list may have changed
            blocks = {tuple(each.keys.shape[:2]) for each in pages}
            count = sum(layer.attends for layer in self.stack.layers)
            if len(pages) != count or len(blocks) != 1:
                raise ValueError(f"{len(pages)} pages for {count} layers, or pages of different sizes")
            paged = iter(pages)
            of = [next(paged) if layer.attends else None for layer in self.stack.layers]
            rows = [
                [0] * _PAGE_WORDS
                if each is None
                else words(each, *self.stack.heads_of(layer)[1:], self.stack.dtype)
                for each, layer in zip(of, self.stack.layers, strict=True)
            ]
            self._pages, self._pages_table = pages, torch.tensor(rows, dtype=torch.int64)
            self.groups = torch.tensor([0 if each is None else each.group for each in of], dtype=torch.int64)
        return self._pages_table

    def room(self, tokens: int, lines: StepLines | None = None) -> tuple[int, ...]:
        """The working memory of a step of ``tokens``: addresses of residual, hidden (twice), wide and narrow, of the
        experts of its tokens with their weights, of what lies beside attention, and of what mixers compute with; then
        of states ahead of those that stay. ``lines``: the rows of mixers.

        The caller holds ``lock`` until the step's end.
        """
        largest, ahead = (lines.largest, lines.ahead) if lines else (0, 0)
        sizes = [tokens * size for size in self._token_bytes]
        sizes += [largest * self._convolved_bytes, tokens * self._mixed_bytes]
        sizes += [ahead * size for size in self._state_bytes]
        return self._room.take([max(size, 1) for size in sizes])

    @property
    def room_words(self) -> tuple[int, ...]:
        """The addresses that `room` returned last, the same object as long as no larger room was needed."""
        return self._room.words

    def states_table(self) -> Tensor:
        """Where the states of each layer are, int64 [layers, words]; computed once for states that stay the same."""
        recurrent, layers = self.stack.recurrent, self.stack.layers
        assert recurrent is not None, "a layer with a mixer has states"
        first = recurrent.of(next(layer.states for layer in layers if layer.mixer is not None))[0]
        if first is not self._states[0]:
            rows = [
                (0,) * _STATE_WORDS
                if layer.mixer is None
                else state_words(layer.mixer, recurrent.of(layer.states))
                for layer in layers
            ]
            self._states, self.state_slots = (first, torch.tensor(rows, dtype=torch.int64)), len(first)
        return self._states[1]

    def _layer_words(self, layer: Layer) -> list[int]:
        heads, packed, feed = self.stack.heads_of(layer), self.stack.packed(layer), layer.feed
        attended = heads.heads * heads.head_dim
        first, inner = _features(packed), attended
        if not layer.attends:
            first, inner = layer.mixer.widths[0], layer.mixer.inner
        linears = [(layer.qkv, self.hidden, first), (layer.output, inner, self.hidden)]
        if isinstance(feed, Mlp):
            inner = feed.down.weight.inputs
            wide = inner if self.stack.activation == "squared_relu" else 2 * inner
            linears += [(feed.gate_up, self.hidden, wide), (feed.down, inner, self.hidden)]
        words = [word for each in linears for word in self.linear_words(*each)]
        words += [0] * (4 * _LINEAR_WORDS - len(words))
        normed = 2 if self.stack.head_norm == "values" else 1
        of_heads = (packed.heads + normed * packed.kv_heads) * heads.head_dim
        words.append(address(layer.qk_norm, torch.float32, of_heads))
        norms = (layer.post_attention_norm, layer.mlp_norm, layer.post_mlp_norm, layer.following_norm)
        words.extend(address(norm, torch.float32, self.hidden) for norm in norms)
        words += [ALL_KEYS if layer.window is None else layer.window, layer.rope]
        words += self._mixture_words(feed) if isinstance(feed, Mixture) else (0, 0)
        words += [
            address(layer.sinks, torch.float32, heads.heads),
            *heads,
            layer.shares,
            self._gate_address(layer),
        ]
        words += [int(np.float64(layer.scale).view(np.int64)), layer.joint]
        return [*words, *self._mixer_words(layer, attended)]

    def _mixer_words(self, layer: Layer, attended: int) -> list[int]:
        """Gates of ``attended`` elements or a mixer's second linear layer, and the address of the mixer's words."""
        gates, beside = [0] * _LINEAR_WORDS, [0] * (2 * _LINEAR_WORDS)
        if layer.gates is not None:
            outputs = attended if layer.attends else layer.mixer.widths[1]
            gates = [*self.linear_words(layer.gates, self.hidden, outputs)]
        if layer.mixer is None:
            return [*gates, 0]
        if layer.beside is not None:
            first = self.linear_words(layer.beside.first, self.hidden, layer.mixer.widths[0])
            beside = [*first, *self.linear_words(layer.beside.output, layer.mixer.inner, self.hidden)]
        self._tables.append(np.array([layer.mixer.address, *beside], dtype=np.int64))
        return [*gates, self._tables[-1].ctypes.data]

    def _gate_address(self, layer: Layer) -> int:
        """Where the words of a layer's input gate are; 0: it has none."""
        if layer.input_gate is None:
            return 0
        if self.stack.per_layer is None:
            raise ValueError("a layer has a gate for an input that there is not")
        width, (gate, projection, norm) = self.stack.per_layer.width, layer.input_gate
        words = [
            *self.linear_words(gate, self.hidden, width),
            *self.linear_words(projection, width, self.hidden),
            address(norm, torch.float32, self.hidden),
        ]
        self._tables.append(np.array(words, dtype=np.int64))
        return self._tables[-1].ctypes.data

    def _mixture_words(self, mixture: Mixture) -> tuple[int, int]:
        router, each = mixture.router, mixture.each
        shared = router.routing.shared != "none"
        if (router.hidden, each.hidden) != (self.hidden, self.hidden) or not router.takes(self.stack.dtype):
            raise ValueError(
                f"experts of {each.hidden} elements, routed by {router.hidden}, for {self.hidden}"
            )
        if len(each.each) != router.routing.experts + shared or each.dtype != self.stack.dtype:
            raise ValueError(f"{len(each.each)} experts for {each.dtype}, routed as {router.routing}")
        return router.address, each.address

    def linear_words(self, linear: Linear, inputs: int, outputs: int) -> tuple[int, ...]:
        """``linear`` [outputs, inputs] as words of a table."""
        return linear_words(linear.weight, linear.bias, self.stack.dtype, inputs, outputs)

    def head_words(self, head: Weight) -> Words:
        """``head``, which gives logits of the stack's states, as words of a table; kept for the next call."""
        if self._head[0] is not head:
            words = self.linear_words(Linear(head, None), self.hidden, head.outputs)
            self._head = head, np.array(words, dtype=np.int64)
        return self._head[1]


def rope_words(table: Tensor) -> tuple[int, int]:
    """Rotations float32 [P, 2, rotary] as words of a table."""
    rotary = table.shape[-1]
    if table.shape[1:] != (2, rotary) or rotary % 2:
        raise ValueError(f"rotations {list(table.shape)}")
    return address(table, torch.float32, table.numel()), rotary


def _features(heads: HeadShape) -> int:
    """The width of a packed row."""
    return (heads.heads + 2 * heads.kv_heads) * heads.head_dim


def native(stack: Stack, room: Room | None = None) -> NativeStack | None:
    """``stack`` for the extension, in the working memory ``room`` or its own.

    None if a linear layer or a mixer is not one of the extension, layers keep latents, or other ranks have a part.
    """
    narrow = stack.dtype == torch.float32 and stack.embedding.dtype == torch.bfloat16
    if (stack.embedding.dtype != stack.dtype and not narrow) or not stack.whole:
        return None
    if not all(_is_native(layer, stack.dtype) for layer in stack.layers):
        return None
    return NativeStack(stack, room)


def _is_native(layer: Layer, dtype: torch.dtype) -> bool:
    """Whether the extension runs a layer."""
    if layer.latent is not None or not all(is_native(linear.weight, dtype) for linear in layer.linears):
        return False
    kinds = (NativeRouter, NativeExperts)
    if isinstance(layer.feed, Mixture) and not all(map(isinstance, layer.feed[:2], kinds)):
        return False
    mixer = layer.mixer
    if mixer is None:
        return True
    if not isinstance(mixer, NativeMixer) or not mixer.address:
        return False
    gated = layer.gates is not None
    return gated == mixer.delta and not (gated and layer.beside is not None)


class StackCall(NamedTuple):
    """The arguments of a stack on a batch. ``out`` [S, hidden] gets its result for the S ``wanted`` positions.

    ``inputs`` are read and overwritten, ``adapters`` and ``states`` own memory of the arguments.
    """

    arguments: tuple[int | float, ...]
    out: Tensor
    wanted: int
    inputs: Tensor | None = None
    adapters: AdapterCall | None = None
    states: StateWords | None = None


class StateWords(NamedTuple):
    """The rows of a step for mixers as ``words``; ``alive`` owns their memory."""

    words: Words
    alive: tuple[Any, ...]


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
    table_of = stack.embedding, len(layers.embedding), layers.embedding.dtype, layers.embedding_scale
    rows_of: tuple[Tensor, ...] = ()
    if batch.features is not None:  # the step has a table of its own, with a row for each token
        ids, (states,) = torch.arange(tokens, dtype=torch.int32), (rows_of := (embedded(layers, batch),))
        table_of = address(states, layers.dtype, tokens * stack.hidden), tokens, layers.dtype, 1.0
    ropes, turns = stack.ropes, stack.turns
    if batch.axes is not None:  # and a rotation for each token
        rotations = rotations_of(layers, batch)
        ropes, turns = torch.tensor([rope_words(each) for each in rotations], dtype=torch.int64), tokens
        lines[0] = torch.arange(tokens)
        rows_of = (*rows_of, ropes, *rotations)
    of_rows = row_lines(batch)
    rows, width = of_rows[2].shape
    table = stack.pages_table(pages, page_words)
    num_blocks, block_size = pages[0].keys.shape[:2]
    check_blocks(0, batch.block_size, num_blocks, block_size)
    count = 1 + len(batch.windows)
    if batch.windows:  # the tables and slots of each group, one after the other
        groups = (batch, *batch.windows)
        lines[1] = torch.cat([batch_lines(each)[1][1] for each in groups])
        tables = torch.stack([row_lines(each)[2] for each in groups])
        of_rows = (*of_rows[:2], tables)
    if int(stack.groups.max()) >= count:
        raise ValueError(f"pages of group {int(stack.groups.max())}, but the batch has tables of {count}")
    row_words = (*(line.data_ptr() for line in of_rows), rows, width)
    arguments = (
        table_of[0],
        stack.table.data_ptr(),
        table.data_ptr(),
        ropes.data_ptr(),
        stack.input_norm,
        len(stack.table),
        ids.data_ptr(),
        *row_words[:3],
        *(line.data_ptr() for line in lines),
        *row_words[3:],
        *(tokens, kept, table_of[1], turns, num_blocks * block_size),
        *(stack.groups.data_ptr() if batch.windows else 0, count),
        *_numbers(stack, *table_of[2:]),
    )
    attending = [layer for layer in layers.layers if layer.attends]
    kinds = {(layer.window, each.group) for layer, each in zip(attending, pages, strict=True)}
    checks = []
    for window, group in kinds if batch.windows else [(window, 0) for window in stack.windows]:
        at = of_rows[2].data_ptr() + group * rows * width * of_rows[2].itemsize
        seen = ALL_KEYS if window is None else window
        checks.append((*row_words[:2], at, rows, width, block_size, seen, tokens))
    alive = (table, stack.groups, ids, *rows_of, *of_rows, *lines)
    return KeptCall(pages, tuple(checks), num_blocks, arguments, alive)


def checked_call(extension: Any, stack: NativeStack, batch: Batch, pages: Sequence[Pages]) -> KeptCall:
    """The shared arguments, after checking the rows that ``batch`` has now."""
    call: KeptCall | None = batch.kept.get(stack)
    if call is None or call.pages is not pages or not isinstance(pages, tuple):  # a list may have changed
        call = batch.kept[stack] = kept_call(stack, batch, pages)
    for rows in call.rows:
        read = extension.check_rows(*rows)
        if read > call.blocks:
            check_blocks(read, batch.block_size, call.blocks, batch.block_size)
    return call


def stack_call(
    extension: Any,
    stack: NativeStack,
    batch: Batch,
    pages: Sequence[Pages],
    seconds: Tensor | None = None,
    inputs: Tensor | None = None,
) -> StackCall:
    """The call of ``stack`` on ``batch``, whose rows are checked; ``inputs`` [T, L * width] are those of its layers."""
    call = checked_call(extension, stack, batch, pages)
    tokens, kept, hidden = len(batch.tokens), len(batch.logits_indices), stack.hidden
    out = torch.empty((kept, hidden), dtype=stack.stack.dtype)
    adapters = None
    if batch.adapters:
        adapters = AdapterCall(batch.adapters, len(stack.table), stack.stack.dtype, stack.panel)
    lines = None if stack.stack.recurrent is None else _step_lines(stack.stack.recurrent, tokens)
    room = stack.room(tokens, lines)
    states = None if lines is None else _state_words(stack, lines, room[_ROOMS:])
    arguments = (
        *room[:_ROOMS],
        out.data_ptr(),
        0 if seconds is None else seconds.data_ptr(),
        0 if batch.interrupt is None else batch.interrupt.address,
        *(_tap_words(batch.taps, tokens, hidden, stack.stack.dtype) if batch.taps else (0, 0, 0)),
        *_input_words(stack, inputs, tokens),
        *(adapters.arguments if adapters else (0, 0)),
        *_deep_words(stack, batch.features),
        joint_address(batch),
        0 if states is None else states.words.ctypes.data,
        *call.arguments,
    )
    return StackCall(arguments, out, kept, inputs, adapters, states)


class GreedyCall(NamedTuple):
    """The ``call`` of a stack for steps that only have tokens, with the arguments and the room it was made of."""

    kept: KeptCall
    room: tuple[int, ...]
    call: StackCall


def greedy_call(
    extension: Any, stack: NativeStack, batch: Batch, pages: Sequence[Pages], inputs: Tensor | None
) -> StackCall:
    """`stack_call` for `run_greedy`, which alone reads its result: both are kept where steps only change the values in
    the batch.
    """
    own = batch.adapters or inputs is not None or stack.stack.recurrent is not None
    if own or any(each is not None for each in (batch.interrupt, batch.taps, batch.features, batch.joint)):
        return stack_call(extension, stack, batch, pages, None, inputs)
    kept, key = checked_call(extension, stack, batch, pages), (GreedyCall, stack)
    found: GreedyCall | None = batch.kept.get(key)
    if found is None or found.kept is not kept or found.room is not stack.room_words:
        call = stack_call(extension, stack, batch, pages)
        found = batch.kept[key] = GreedyCall(kept, stack.room_words, call)
    return found.call


def run_greedy(extension: Any, level: int, head: PackedWeight, call: StackCall) -> Words | None:
    """The first token int64 [S] of the largest output of a head for each state that ``call`` returns; None: the step
    was interrupted.
    """
    screen = head.screen
    copy: tuple[int, ...] = (0, 0, 0, 0)
    if screen is not None and screen.helps():
        copy = screen.addresses
    tokens = np.empty(call.wanted, dtype=np.int64)
    groups = extension.greedy(level, *call.arguments, *head.weights, *copy, head.outputs, tokens)
    if groups is None:
        return None
    if screen is not None and copy[0]:
        screen.note(groups)
    return tokens


def _step_lines(recurrent: RecurrentStates, tokens: int) -> StepLines:
    """The rows of a step for mixers.

    Raises:
        ValueError: they do not divide the tokens.
    """
    rows = recurrent.rows
    assert isinstance(rows, StepRows), "a CPU has no graphs"
    lines = step_lines(rows)
    if int(rows.starts[-1]) != tokens:
        raise ValueError(f"rows of {rows.starts[-1]} tokens for a batch of {tokens}")
    return lines


def _state_words(stack: NativeStack, lines: StepLines, ahead: tuple[int, ...]) -> StateWords:
    """The rows of a step in the order of `StackStates` in `csrc/stack.h`."""
    table = stack.states_table()
    slots = stack.state_slots
    words = [
        *lines.addresses,
        lines.parts.data_ptr(),
        table.data_ptr(),
        *ahead,
        len(lines.parts),
        slots,
        lines.ahead,
    ]
    return StateWords(np.array(words, dtype=np.int64), (lines, table))


def _input_words(stack: NativeStack, inputs: Tensor | None, tokens: int) -> tuple[int, int]:
    """Where the inputs of layers are, and how wide each is."""
    of = stack.stack.per_layer
    if of is None or inputs is None:
        return 0, 0
    return address(inputs, stack.stack.dtype, tokens * len(stack.table) * of.width), of.width


def _deep_words(stack: NativeStack, features: Features | None) -> tuple[int, int, int, int]:
    """Where the rows of images are that belong behind layers, for how many layers, their places, and the number of
    these.
    """
    if features is None or features.deep is None:
        return 0, 0, 0, 0
    places, deep = features.places, features.deep
    check_cpu(places)
    if deep.shape[1:] != (len(places), stack.hidden) or len(deep) >= len(stack.table):
        raise ValueError(
            f"states of images {list(deep.shape)} for {len(places)} places, {len(stack.table)} layers"
        )
    if places.dtype != torch.int64 or not places.is_contiguous():
        raise ValueError(f"places of images must be int64 and contiguous, not {places.dtype}")
    return address(deep, stack.stack.dtype, deep.numel()), len(deep), places.data_ptr(), len(places)


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
        *stack.room(tokens)[:_ROOMS],
        normed.data_ptr(),
        0,
        0 if batch.interrupt is None else batch.interrupt.address,
        *(out.data_ptr(), stack.after.data_ptr(), 1),
        *(0, 0),  # no inputs of layers
        *(0, 0),  # no adapters
        *(0, 0, 0, 0, 0),  # no images
        0,  # no recurrent states
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
        *(0, 1),  # no groups of window layers
        *_numbers(stack, dtype, 1.0),
    )
    return StackCall(arguments, out, tokens)


def _numbers(stack: NativeStack, embedding: torch.dtype, embedding_scale: float) -> tuple[int | float, ...]:
    """The arguments at the end of every call of a stack, whatever its batch."""
    layers, dtype = stack.stack, stack.stack.dtype
    return (
        stack.hidden,
        dtype.itemsize,
        DTYPES[dtype],
        ACTIVATIONS[layers.activation],
        HEAD_NORMS[layers.head_norm],
        layers.eps,
        layers.scale,
        layers.softcap or 0.0,
        DTYPES[embedding],
        embedding_scale,
        *layers.multipliers,
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
    if call.wanted != kept:
        raise ValueError(f"{kept} drafts for {call.wanted} wanted positions")
    dtype = stack.stack.dtype
    if isinstance(head, PackedWeight) and head.dtype != dtype:
        raise ValueError(f"a head of {head.dtype} after a stack of {dtype}")
    logits = torch.empty((kept, head.outputs))
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
