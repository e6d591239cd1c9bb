"""Graphs of decode steps: recorded at start-up, the largest first, and replayed for the steps that they can compute."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.compute.graphs.body import Decoder, Ending, StepBody, Variant
from headrace.compute.graphs.buffers import Fetched, Staging, StepBuffers
from headrace.compute.graphs.recorder import Recorder
from headrace.compute.graphs.sizes import graph_sizes
from headrace.compute.kv import PagedKV
from headrace.compute.sampling.lines import NO_DRAFT, Lines
from headrace.compute.sampling.sampler import Drawing
from headrace.compute.slots import Growth, Slots

_ANY_TOKEN = (1.0, 0.0, 0, 1.0, 0.0)
"""Temperature, min_p, top_k, top_p and random number of a line that is not sampled, as in `Choice`."""


class GraphSpec(NamedTuple):
    """Which graphs to record: for at most ``lines`` lines of ``hidden_size`` states.

    ``drafts`` says whether a drafter proposes tokens.
    """

    recorder: Recorder
    lines: int
    drafts: bool
    hidden_size: int
    dtype: torch.dtype


class Captured(NamedTuple):
    """What was recorded: graphs of at most ``lines`` lines, in memory that includes the libraries' own for them.

    ``problem`` says why larger graphs could not be recorded; empty: all were.
    """

    graphs: int
    lines: int
    bytes: int
    seconds: float
    problem: str = ""


class GraphedSteps:
    """The graphs of one runner, over its slots and pages."""

    def __init__(self, spec: GraphSpec, decoder: Decoder, kv: PagedKV, slots: Slots) -> None:
        self._recorder = spec.recorder
        self._sizes = graph_sizes(spec.lines)
        self._drafts = spec.drafts
        most = self._sizes[-1]
        self._slots = slots
        self._buffers = StepBuffers(spec.recorder, slots.device, self._sizes, spec.hidden_size, spec.dtype)
        self._body = StepBody(decoder, kv, slots, self._buffers, most)
        self._replays: dict[Variant, Callable[[], None]] = {}
        self._held: tuple[int, ...] = ()
        self._addresses: tuple[int, ...] = ()

    @torch.inference_mode()
    def capture(self) -> Captured:
        """Record all graphs that the device has memory for, before the first step."""
        began, used = time.perf_counter(), self._recorder.used_bytes()
        problem, held = "", []
        for size in reversed(self._sizes):
            replays = {}
            self._stage_padding(size)
            try:
                for variant in self._variants(size):
                    replays[variant] = self._recorder.record(partial(self._body.run, variant))
            except RuntimeError as error:  # torch's own errors of memory are among them
                problem = problem or f"{size} lines: {str(error).splitlines()[0]}"
                continue
            self._replays |= replays
            held.append(size)
        self._held = tuple(reversed(held))
        self._addresses = self._body.addresses()
        return Captured(
            len(self._replays),
            max(held, default=0),
            max(0, self._recorder.used_bytes() - used),
            time.perf_counter() - began,
            problem,
        )

    def find(self, lines: int, ending: Ending, verifies: bool) -> Variant | None:
        """The smallest graph that computes so many lines; None if there is none."""
        at = bisect_left(self._held, lines)
        if at == len(self._held):
            return None
        variant = Variant(self._held[at], ending, verifies)
        return variant if variant in self._replays else None

    def join(self) -> None:
        """Let operations of torch from now on come after the replays."""
        self._recorder.join()

    def launch(self, variant: Variant, lines: Lines, growth: Growth | None, drawing: Drawing | None) -> None:
        """Queue a step: its inputs, and a replay of the graph.

        Raises:
            RuntimeError: a buffer is not where it was when the graph was recorded, which would read other memory.
        """
        if self._body.addresses() != self._addresses:
            raise RuntimeError("a buffer of the graphs has moved")
        if growth is not None and len(growth.blocks) > variant.size:  # more blocks than lines
            self.join()
            self._slots.send(growth)
            growth = None
        staging = self._buffers.stage()
        self._fill(staging, variant, lines, growth, drawing)
        self._buffers.send(staging, variant.size)
        self._replays[variant]()

    def fetch(self, variant: Variant, lines: int) -> Fetched:
        """Queue the copy of the drawn tokens, and with drafts of what counts."""
        return self._buffers.fetch(lines, variant.size, 1 + variant.verifies)

    def states(self, lines: int) -> torch.Tensor:
        """The states [lines, hidden] of the last step that ended with them."""
        self.join()
        return self._buffers.states[:lines]

    def _variants(self, size: int) -> Iterator[Variant]:
        """The graphs of a size. Without a drafter only grammars draft, and their tokens are drawn from states."""
        for ending in Ending:
            yield Variant(size, ending, verifies=False)
            if self._drafts or ending is Ending.STATES:
                yield Variant(size, ending, verifies=True)

    def _stage_padding(self, size: int) -> None:
        """Fill the buffers with lines that do nothing, on which recording may run."""
        none = np.zeros(0, dtype=np.int64)
        staging = self._buffers.stage()
        variant = Variant(size, Ending.SAMPLED, verifies=True)  # its inputs are those of all others, too
        self._fill(staging, variant, Lines(none, none, none, none, none, False), None, None)
        self._buffers.send(staging, size)

    def _fill(
        self, staging: Staging, variant: Variant, lines: Lines, growth: Growth | None, drawing: Drawing | None
    ) -> None:
        """Write the inputs of a step, and behind them padding of the spare slot."""
        slots, count = self._slots, len(lines.rows)
        into = staging.fields(variant.size)
        spare, before = len(slots.tokens) - 1, lines.positions - 1

        def put(field: np.ndarray[tuple[int, ...], np.dtype[np.generic]], values: Any, rest: Any) -> None:
            field[:count] = values
            field[count:] = rest

        put(into.places, slots.places(lines.slots, before), spare * (slots.max_model_len + 1))
        put(into.positions, before, 0)
        put(into.mapping, slots.mapping(lines.slots, before), -1)
        put(into.slots, lines.slots, spare)
        put(into.contexts, lines.positions, 0)
        grown = 0 if growth is None else len(growth.blocks)
        into.table_places[grown:] = spare * slots.max_blocks
        into.table_blocks[grown:] = 0
        if growth is not None:
            into.table_places[:grown], into.table_blocks[:grown] = growth
        if variant.verifies:
            own = np.arange(variant.size)
            put(into.drafts, lines.drafts, NO_DRAFT)
            put(into.first, own[:count] - lines.offsets, own[count:])
            put(into.offsets, lines.offsets, 0)
        if variant.ending is Ending.SAMPLED:
            choice = _ANY_TOKEN if drawing is None else drawing.choice
            put(into.random, 0 if drawing is None else drawing.random, 0)
            for field, values, rest in zip(
                (into.temperature, into.min_p, into.top_k, into.top_p, into.uniform),
                choice,
                _ANY_TOKEN,
                strict=True,
            ):
                put(field, values, rest)
