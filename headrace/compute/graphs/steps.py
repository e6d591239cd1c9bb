"""Records graphs of decode steps at start-up, the largest first, and replays them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.graphs.body import Decoder, Ending, StepBody, Variant
from headrace.compute.graphs.buffers import CudaRecorder, Fetched, Fields, Recorder, Staging, StepBuffers
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.sampling.choice import NO_DRAFT
from headrace.compute.sampling.sampler import Drawing
from headrace.compute.shared_keys import RowGroups
from headrace.compute.slots import Growth, Rows, Slots
from headrace.compute.step_sampling import Lines
from headrace.core.capacity import activation_bytes

# The numbers of lines for which graphs are recorded: a step takes the smallest graph that holds it.

MOST_LINES = 512
"""Maximum lines of a graph that samples tokens."""

MOST_TOKENS = 2048  # see docs/decisions/gpu.md#mixed-steps-in-graphs
"""Maximum tokens of a graph of steps with prompts. Larger steps are launched operation by operation: the device takes
longer than the host anyway, although the launches compete with HTTP threads for the interpreter lock."""

MOST_KEYS_AGAIN = 1 << 17
"""Limit of additional key reads. A graph reads the keys of a long row once for every few tokens, more often than a step
without graphs. Up to this limit that takes less time than the launches: half a gigabyte per layer of Llama-3.1-8B,
mostly from the cache."""


def few_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The ``sizes`` that further kinds of graphs have: 2, 4, 8, 16, 24, 32, 48, … and the largest.

    They are few, because each graph takes start-up time and memory.
    """
    few = [size for size in sizes if size > 1 and (_doubled(size) or (size % 3 == 0 and _doubled(size // 3)))]
    return (*few, *(size for size in sizes[-1:] if size > 1 and size not in few))


def _doubled(size: int) -> bool:
    """Whether ``size`` is a power of two."""
    return size & (size - 1) == 0


def graph_sizes(lines: int) -> tuple[int, ...]:
    """Ascending sizes up to the first that holds ``lines``, or `MOST_LINES`: padding is at most 7 lines, then 15."""
    every = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_LINES + 1, 16))
    return tuple(size for number, size in enumerate(every) if not number or every[number - 1] < lines)


def prompt_sizes(tokens: int) -> tuple[int, ...]:
    """Sizes for steps with prompts, ascending up to the first that holds ``tokens``, or `MOST_TOKENS`: beyond
    `MOST_LINES` padding is at most 63 tokens, then 127.
    """
    small = few_sizes(graph_sizes(min(tokens, MOST_LINES)))
    large = (*range(MOST_LINES + 64, 1025, 64), *range(1152, MOST_TOKENS + 1, 128))
    smaller = (MOST_LINES, *large)
    return small + tuple(size for size, before in zip(large, smaller, strict=False) if before < tokens)


_ANY_TOKEN = (1.0, 0.0, 0, 1.0, 0.0)
"""Temperature, min_p, top_k, top_p and random number of a line that is not sampled, as in `TokenChoice`."""

_NO_PENALTY = (0, 1.0, 0.0, 0.0, 0)
"""Lane, repetition, presence and frequency of a line without penalties, which is not counted: see `LinePenalties`."""


class GraphSpec(NamedTuple):
    """The graphs to record: for at most ``lines`` sampled lines with states of ``hidden_size``, and for steps with
    prompts of at most ``tokens`` tokens.

    ``drafts``: there is a drafter. For rows of many tokens, attention reads the keys once per ``row_tokens`` tokens.
    ``single``: only rows of one token are recorded, as recurrent states need it.
    """

    recorder: Recorder
    lines: int
    drafts: bool
    hidden_size: int
    dtype: torch.dtype
    row_tokens: int
    tokens: int
    single: bool = False


class Captured(NamedTuple):
    """The recorded graphs, of at most ``lines`` lines; their memory includes that of libraries.

    ``problem`` says why larger graphs could not be recorded; empty if all were.
    """

    graphs: int
    lines: int
    bytes: int
    seconds: float
    problem: str = ""


class GraphedSteps:
    """The graphs of one runner, over its slots and pages; ``padding`` counts lines that were computed for no token."""

    def __init__(
        self,
        spec: GraphSpec,
        decoder: Decoder,
        kv: PagedKV,
        slots: Slots,
        counts: torch.Tensor,
        states: torch.Tensor | None = None,
    ) -> None:
        self.padding = 0
        self._single = spec.single
        self._row_tokens = spec.row_tokens
        self._recorder = spec.recorder
        self._drawing = graph_sizes(spec.lines)
        self._sizes = sorted({*self._drawing, *prompt_sizes(max(spec.tokens, spec.lines))})
        self._drafts = spec.drafts
        most = self._sizes[-1]
        self._slots = slots
        self._buffers = StepBuffers(spec.recorder, slots.device, self._sizes, spec.hidden_size, spec.dtype)
        self._body = StepBody(decoder, kv, slots, self._buffers, counts, most, spec.row_tokens, states)
        self._replays: dict[Variant, Callable[[], None]] = {}
        self._held: dict[tuple[Any, ...], list[int]] = {}
        self._addresses: tuple[int, ...] = ()

    @torch.inference_mode()
    def capture(self) -> Captured:
        """Record all graphs that the device has memory for, before the first step."""
        began, used = time.perf_counter(), self._recorder.used_bytes()
        problem = ""
        for size in reversed(self._sizes):
            replays = {}
            self._stage_padding(size)
            try:
                for variant in self._variants(size):
                    replays[variant] = self._recorder.record(partial(self._body.run, variant))
            except RuntimeError as error:  # includes torch's out-of-memory errors
                problem = problem or f"{size} lines: {str(error).splitlines()[0]}"
                continue
            self._replays |= replays
        for variant in sorted(self._replays, key=lambda variant: variant.size):
            self._held.setdefault(variant[1:], []).append(variant.size)
        self._addresses = self._body.addresses()
        return Captured(
            len(self._replays),
            max((variant.size for variant in self._replays), default=0),
            max(0, self._recorder.used_bytes() - used),
            time.perf_counter() - began,
            problem,
        )

    def find(self, lines: int, ending: Ending, verifies: bool, shares: bool) -> Variant | None:
        """The smallest graph for ``lines`` lines, preferably one with shared keys if rows share keys; None if there is
        none.
        """
        held = self._held.get((ending, verifies, shares), [])
        at = bisect_left(held, lines)
        if at < len(held):
            return Variant(held[at], ending, verifies, shares)
        return self.find(lines, ending, verifies, False) if shares else None

    def suits(self, rows: Rows) -> bool:
        """Whether a graph is suitable for these rows, since it reads the keys of long rows once per few tokens."""
        again = (rows.length - 1) // self._row_tokens * rows.end
        return bool(again.sum() <= MOST_KEYS_AGAIN)

    def join(self) -> None:
        """Make later torch operations wait for the replays."""
        self._recorder.join()

    def launch(
        self,
        variant: Variant,
        lines: Lines,
        growth: Growth | None,
        drawing: Drawing | None,
        shared: RowGroups | None,
    ) -> None:
        """Queue a step whose rows share keys in these groups: its inputs, and a replay of the graph.

        Raises:
            RuntimeError: the address of a buffer has changed since the graph was recorded.
        """
        if self._body.addresses() != self._addresses:
            raise RuntimeError("a buffer of the graphs has moved")
        if growth is not None and len(growth.blocks) > variant.size:  # more blocks than lines
            self.join()
            self._slots.send(growth)
            growth = None
        staging = self._buffers.stage()
        self._fill(staging, variant, lines, growth, drawing, shared)
        self._buffers.send(staging, variant.size)
        self._replays[variant]()
        self.padding += variant.size - len(lines.rows)

    def fetch(self, variant: Variant, lines: int) -> Fetched:
        """Queue the copy of the sampled tokens, and with drafts, of which tokens count."""
        return self._buffers.fetch(lines, variant.size, 1 + variant.verifies)

    def states(self, lines: int) -> torch.Tensor:
        """The hidden states [lines, hidden] of the last step that ended with states."""
        self.join()
        return self._buffers.states[:lines]

    def _variants(self, size: int) -> Iterator[Variant]:
        """The graphs of a size. Without a drafter only grammars draft, and their tokens are drawn from states, as those
        of a step with prompts are: it may have more tokens than are ever drawn.
        """
        if size not in self._drawing:
            if not self._single:
                yield Variant(size, Ending.STATES, verifies=True)
            return
        for shares in (False, True)[: 1 + (size in few_sizes(self._drawing))]:
            for ending in Ending:
                yield Variant(size, ending, False, shares)
                if (self._drafts or ending is Ending.STATES) and not self._single:
                    yield Variant(size, ending, True, shares)

    def _stage_padding(self, size: int) -> None:
        """Fill the buffers with padding lines for recording."""
        none = np.zeros(0, dtype=np.int64)
        staging = self._buffers.stage()
        variant = Variant(size, Ending.PENALIZED, verifies=True)  # its inputs include those of all others
        self._fill(staging, variant, Lines(none, none, none, none, none, False), None, None, None)
        self._buffers.send(staging, size)

    def _fill(
        self,
        staging: Staging,
        variant: Variant,
        lines: Lines,
        growth: Growth | None,
        drawing: Drawing | None,
        shared: RowGroups | None,
    ) -> None:
        """Write the inputs of a step, followed by padding with the spare slot."""
        slots, count = self._slots, len(lines.rows)
        into = staging.fields(variant.size)
        spare, before = len(slots.tokens) - 1, lines.positions - 1

        _put(into.places, slots.places(lines.slots, before), spare * (slots.max_model_len + 1))
        _put(into.positions, before, 0)
        _put(into.mapping, slots.mapping(lines.slots, before), -1)
        last = np.arange(count)
        if variant.verifies:
            first = np.flatnonzero(lines.offsets % self._row_tokens == 0)
            last = np.append(first[1:], count)[: first.size] - 1
            # Behind them, each line of padding is a row of its own, and what is left of the rows is empty.
            rest = np.minimum(count + np.arange(len(into.starts) - first.size), variant.size)
            _put(into.starts, first, rest)
        _put_shared(into, shared, lines.rows, last)
        _put(into.slots, lines.slots[last], spare)
        _put(into.contexts, lines.positions[last], 0)
        grown = 0 if growth is None else len(growth.blocks)
        into.table_places[grown:] = spare * slots.max_blocks
        into.table_blocks[grown:] = 0
        if growth is not None:
            into.table_places[:grown], into.table_blocks[:grown] = growth
        if variant.verifies:
            own = np.arange(variant.size)
            _put(into.drafts, lines.drafts, NO_DRAFT)
            _put(into.first, own[:count] - lines.offsets, own[count:])
            _put(into.offsets, lines.offsets, 0)
        if variant.ending in (Ending.SAMPLED, Ending.PENALIZED):
            _put_drawing(into, drawing, variant.ending is Ending.PENALIZED)


def _put(field: np.ndarray[tuple[int, ...], np.dtype[np.generic]], values: Any, rest: Any) -> None:
    """Write the ``values`` of lines or rows, and ``rest`` behind them."""
    field[: len(values)] = values
    field[len(values) :] = rest


def _put_shared(into: Fields[Any], shared: RowGroups | None, owners: Ints, last: Ints) -> None:
    """Write the groups of lines, whose rows of attention end with the lines ``last``; padding shares nothing."""
    arranged = 0
    into.groups[:] = into.shared[:] = 0
    if shared is not None:
        arranged = len(owners)
        order, into.groups[:] = shared.arrange(owners, np.searchsorted(last, np.arange(arranged)))
        into.order[:arranged] = order
        into.shared[: len(last)] = shared.keys[owners[last]]
    into.order[arranged:] = np.arange(arranged, len(into.order))
    into.groups[-3] += len(into.order) - arranged  # tokens of the last group, which shares nothing


def _put_drawing(into: Fields[Any], drawing: Drawing | None, penalized: bool) -> None:
    """Write the sampling parameters; without ``drawing``, those of padding."""
    nothing: tuple[Any, ...] = ((),) * 5
    _put(into.random, () if drawing is None else drawing.random, 0)
    fields = (into.temperature, into.min_p, into.top_k, into.top_p, into.uniform)
    values = nothing if drawing is None else drawing.choice
    for field, value, rest in zip(fields, values, _ANY_TOKEN, strict=True):
        _put(field, value, rest)
    if penalized:
        fields = (into.lanes, into.repetition, into.presence, into.frequency, into.counted)
        values = nothing if drawing is None or drawing.penalties is None else drawing.penalties
        for field, value, rest in zip(fields, values, _NO_PENALTY, strict=True):
            _put(field, value, rest)


# The graphs of decode steps that a model records, their reserved memory, and their line in the memory plan.

GRAPHED_KERNELS = frozenset({"triton"})
"""Backends whose decode step uses no host arrays; torch's attention creates some in each step."""

TILE_LINES = 32
"""Query heads times tokens for which attention reads the keys of a row once: an estimate, not measured."""

GRAPH_BYTES = 1 << 20
"""Memory of a recorded graph in addition to its activations: an estimate."""


class Graphs(NamedTuple):
    """The graphs to record (None: none), and the memory to reserve for them in bytes."""

    spec: GraphSpec | None
    bytes: int = 0


def plan_graphs(decoder: ModelDecoder, rows: int, drafts: int | None, tokens: int) -> Graphs:
    """The graphs for steps of at most ``rows`` rows and ``tokens`` tokens; none on a CPU, or with kernels that cannot
    be recorded.

    ``drafts`` is the maximum number of drafts of a row in a step; None: no drafter.
    """
    on_device = decoder.device.type == "cuda" and decoder.kernels.name in GRAPHED_KERNELS
    if not (decoder.graphed and on_device):
        return Graphs(None)
    lines, drafting = min(MOST_LINES, rows * (1 + (drafts or 0))), drafts is not None
    most = max(1, TILE_LINES // (decoder.shape.heads.heads // decoder.shape.heads.kv_heads))
    row_tokens = most if drafts is None else min(most, 1 + drafts)
    spec = GraphSpec(
        CudaRecorder(decoder.device),
        lines,
        drafting,
        decoder.shape.hidden_size,
        decoder.dtype,
        row_tokens,
        min(tokens, MOST_TOKENS),
        single=decoder.states is not None,
    )
    counts = (rows + 1) * decoder.shape.vocab_size * 4
    return Graphs(spec, _graph_bytes(decoder, spec) + counts)


def _graph_bytes(decoder: ModelDecoder, spec: GraphSpec) -> int:
    """Memory to reserve for graphs: that of the largest step, which all graphs share, and the overhead of each."""
    sizes, few = graph_sizes(spec.lines), prompt_sizes(max(spec.tokens, spec.lines))
    graphs = (len(sizes) + len(few_sizes(sizes))) * (2 * len(Ending) if spec.drafts else len(Ending) + 1)
    step = activation_bytes(
        hidden_size=decoder.shape.hidden_size,
        intermediate_size=decoder.shape.intermediate_size,
        vocab_size=decoder.shape.vocab_size,
        itemsize=decoder.dtype.itemsize,
        max_num_batched_tokens=few[-1],
        max_num_seqs=0,  # a graph samples from its logits as they are, without a copy
    )
    step += 2 * sizes[-1] * decoder.shape.vocab_size * 4  # and those that are penalized in float32
    return step + (graphs + len(few)) * GRAPH_BYTES


def describe_graphs(captured: Captured) -> str:
    """What was recorded, as a line of the memory plan."""
    done = (
        f"{captured.graphs}, for up to {captured.lines} tokens per step, recorded in {captured.seconds:.1f} s"
    )
    if not captured.problem:
        return done
    return (
        f"{done}; larger decode steps are launched operation by operation, because recording failed at"
        f" {captured.problem} (lower --gpu-memory-utilization or --max-num-seqs, or use --enforce-eager)"
    )
