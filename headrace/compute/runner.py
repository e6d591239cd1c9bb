"""The local runner: executes a plan as one packed forward pass and one batch of sampled tokens.

```
 plan.entries -> slots, sampler      plan.rows -> Batch -> decoder -> logits (only where wanted)
 plan.moves   -> mover               logits -> sampler -> tokens -> slots   (stay on the device)
                                                          `-> Download -> StepOutput   (in `collect`)
```
If `graphs` can compute a step, one replay does all of that. On CUDA `launch` only queues work, and only `collect`
waits. On a CPU `background` runs the work on a separate thread, so that planning the next step overlaps with it. A row
with drafts needs the logits of several positions: see `step_sampling`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.adapters.store import SlotAdapters
from headrace.compute.batch import Ints, StepInterrupt, StepInterrupted, Taps, ramps
from headrace.compute.device import FreedMemory, idle_team
from headrace.compute.drafting.head import HeadDrafts
from headrace.compute.grammar.matchers import Matchers
from headrace.compute.graphs.body import Decoder, Ending, Variant, compile_others
from headrace.compute.graphs.steps import Captured, GraphedSteps, GraphSpec
from headrace.compute.images.slots import SlotImages
from headrace.compute.memory_clearing import MemoryClearing
from headrace.compute.model.kv import PagedKV
from headrace.compute.mover import Mover, move_blocks
from headrace.compute.parallel import Followers
from headrace.compute.results import Arriving, HostStep, Launched, Sampled, output_of
from headrace.compute.sampling.logprobs import Scores
from headrace.compute.sampling.sampler import Drawing
from headrace.compute.shared_keys import RowGroups
from headrace.compute.slots import Rows, Slots
from headrace.compute.states import StateTensors
from headrace.compute.step_sampling import Columns, Lines, StepSampling, every_token
from headrace.compute.transfer import Download, upload
from headrace.core.capacity import max_logit_rows
from headrace.core.plan import Entry, Move, StepOutput, StepPlan

LESS_MEMORY = (
    "If this happens often, use a lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs."
)


class _Positions(NamedTuple):
    """Packed positions of a step with needed states: all, those to sample from, those to score, and scores per row."""

    wanted: Ints
    sampled: Ints
    scored: Ints
    spans: Ints


class LocalRunner:
    """`core.ports.Runner` on one device.

    ``seconds`` sums the host's time per phase since the start: ``prepare`` (slots, moves, packing), ``forward``,
    ``sample`` (including storing the tokens) and ``collect`` (waiting and converting results). On CUDA the first
    three are the time to queue the work, and the device's time shows in ``collect``. ``interrupt`` interrupts idle
    plans if they are ``breakable``: when each plan is collected before the next is launched.
    ``matchers`` hold the grammars of structured outputs; without them such a request fails. ``head`` drafts with the
    hidden states of each step. ``graphs`` says which graphs `capture` records; a head needs steps without graphs.
    ``followers`` are the other ranks of a parallel model: only this runner samples, without graphs. ``pipelined``: the
    first stage starts the next plan while other stages compute, unless the plan needs their tokens. ``states``: the
    recurrent states of the model, which then needs to know the slot of each row. ``adapters`` are those of its slots: a
    step with rows that have some uses no graphs. ``freed`` returns memory of earlier steps.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        background: bool = False,
        breakable: bool = False,
        mover: Mover | None = None,
        ahead: MemoryClearing | None = None,
        matchers: Matchers | None = None,
        head: HeadDrafts | None = None,
        graphs: GraphSpec | None = None,
        followers: Followers | None = None,
        pipelined: bool = False,
        states: StateTensors | None = None,
        adapters: SlotAdapters | None = None,
        freed: FreedMemory | None = None,
    ) -> None:
        self.seconds = dict.fromkeys(("prepare", "forward", "sample", "collect"), 0.0)
        self.interrupt = StepInterrupt()
        self._breakable, self._decoder, self._kv, self._device = breakable, decoder, kv, device
        self._mover, self._ahead, self._freed = mover, ahead, freed
        self._matchers, self._head, self._states = matchers, head, states
        self._followers, self._pipelined = followers, pipelined
        self._adapters = adapters or SlotAdapters()
        self._images = SlotImages(device, max_num_seqs)
        self._begun: deque[HostStep] = deque()
        self._slots = Slots(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv.block_size,
            device=device,
            spare=graphs is not None,
            held=followers is not None,
            windows=max(pages.group for pages in kv.layers) if kv.layers else 0,
        )
        if head is not None:
            head.bind(self._slots)
        self._sampling = StepSampling(
            decoder,
            self._slots,
            self.seconds,
            vocab_size=vocab_size,
            max_logit_rows=max_logit_rows(max_num_seqs),  # as sized at start-up
            matchers=matchers,
            append=self._append,
            graphs=graphs is not None,
            apart=head is not None or followers is not None,
        )
        self._graphs = None
        if graphs is not None:
            kept = None if states is None else states.rows
            self._graphs = GraphedSteps(graphs, decoder, kv, self._slots, self._sampling.counts, kept)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-runner") if background else None
        self._idle_team = idle_team() if background else None
        self._launched: deque[Future[Launched] | HostStep] = deque()

    @property
    def padding_tokens(self) -> int:
        """Lines of graphs that were computed for no token."""
        return 0 if self._graphs is None else self._graphs.padding

    def capture(self) -> Captured | None:
        """Record the graphs, before the first step; None if there are none to record."""
        return None if self._graphs is None else self._graphs.capture()

    def compile_others(self) -> None:
        """Launch the kernels of steps that no graph computes, before the first request: see `graphs.body`."""
        if self._graphs is not None:
            compile_others(self._decoder, self._kv, self._slots.max_model_len, self._states)

    def launch(self, plan: StepPlan, now: float) -> None:
        """Start a plan. It never raises for the plan's work: `collect` raises its exception."""
        # Nothing is in flight: after a lost rank, the others may start again from a clean state.
        restore = not self._launched
        self._adapters.launched(plan)
        if self._thread is not None:
            self._launched.append(self._thread.submit(self._execute_whole, plan, restore))
            return
        # A pipelined step has begun but has no tokens yet. This plan needs them if it has rows of the same slots.
        if self._begun:
            slots = {row.slot for row in plan.rows} | {entry.slot for entry in plan.entries}
            while any(slots & each.slots for each in self._begun):
                self._end_oldest()
        step = HostStep()
        self._launched.append(step)
        step.run(partial(self._execute, plan, restore))
        if step.end is not None:
            step.slots = frozenset(row.slot for row in plan.rows if row.samples)
            self._begun.append(step)

    @torch.inference_mode()
    def _execute_whole(self, plan: StepPlan, restore: bool) -> Launched:
        launched = self._execute(plan, restore)
        return launched if isinstance(launched, Launched) else launched()

    @torch.inference_mode()
    def _end_oldest(self) -> None:
        step = self._begun.popleft()
        assert step.end is not None
        step.run(step.end)

    def collect(self) -> StepOutput:
        """Wait for the oldest launched plan and return its output; raises what its forward pass raised."""
        began = time.perf_counter()
        try:
            oldest = self._launched.popleft()
            if self._begun and self._begun[0] is oldest:
                self._end_oldest()
            launched = oldest.result()
            output = output_of(launched)
            if self._mover is not None:
                output = output._replace(arrivals=self._mover.arrivals(wait=launched.waits))
            return output
        finally:
            if self._ahead is not None and not self._launched:
                self._ahead.rest()
            self.seconds["collect"] += time.perf_counter() - began

    def forget_batches(self) -> None:
        """Forget the batches of earlier steps, which hold prepared weights."""
        if self._slots.arrays is not None:
            self._slots.arrays.forget()

    def clear(self) -> None:
        """Make blocks, host pages and states zeros, and give their memory back to the system, on a CPU."""
        if self._ahead is not None:
            self._ahead.restart()
        for memory in (self._mover, self._kv, self._states):
            if memory is not None:
                memory.clear()

    def close(self) -> None:
        """Finish the launched plans and end the background thread."""
        for thread in (self._thread, self._idle_team):
            if thread is not None:
                thread.shutdown()
        if self._matchers is not None:
            self._matchers.close()
        if self._mover is not None:
            self._mover.close()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, restore: bool) -> Launched | Callable[[], Launched]:
        # 1. Slots and blocks: admit sequences, then move blocks. Both must precede all rows of the plan.
        began = time.perf_counter()
        if self._freed is not None:
            self._freed.step()
        self._adapters.begin()
        if restore and self._followers is not None and self._followers.restore() and self._mover is not None:
            self._mover.restart()
        if self._graphs is not None and (plan.entries or plan.moves):
            self._graphs.join()
        known = [self._admit(entry) for entry in plan.entries]
        self._move(plan.moves)
        self._slots.place(plan.placed)
        if not plan.rows:
            if self._followers is not None:
                self._followers.execute(plan, known, np.zeros(0, dtype=np.int64))
            return Launched(plan.step, 0, {}, Download(self._device), waits=plan.waits)
        # 2. The rows. If memory ends, the rows fail and the server goes on: their slots hold nothing that others need.
        try:
            return self._step(plan, known, began)
        except torch.OutOfMemoryError as error:
            why = f"the device is out of memory in this step: {str(error).splitlines()[0]} {LESS_MEMORY}"
        # Behind the handler nothing holds the step's tensors any more.
        torch.cuda.empty_cache()
        if self._states is not None:
            self._states.lose(row.slot for row in plan.rows)
        failures = dict.fromkeys(range(len(plan.rows)), why)
        return Launched(plan.step, len(plan.rows), failures, Download(self._device))

    def _step(self, plan: StepPlan, known: Sequence[Ints], began: float) -> Launched | Callable[[], Launched]:
        columns = self._sampling.columns_of(plan.rows)
        rows, lines, _ = columns
        # By a recorded graph if one fits, else operation by operation.
        if self._graphs is not None:
            drawing, shared = self._sampling.drawing(lines), self._slots.shared_keys(rows)
            variant = self._variant(self._graphs, plan, columns, drawing, shared)
            if variant is not None:
                return self._replay(self._graphs, variant, plan, columns, drawing, shared, began)
            self._graphs.join()
        return self._compute(plan, columns, known, began)

    def _variant(
        self,
        graphs: GraphedSteps,
        plan: StepPlan,
        columns: Columns,
        drawing: Drawing | None,
        shared: RowGroups | None,
    ) -> Variant | None:
        """The graph of a step; None without one, for scored prompts, adapters, images, interruptible steps, and rows of
        several tokens beside recurrent states.
        """
        rows, lines, _ = columns
        if self._sampling.spans(rows).any() or (self._breakable and plan.idle) or self._adapters.of_rows:
            return None
        several = self._states is not None and (plan.ahead or (rows.length != 1).any())
        if several or self._images.touches(rows):
            return None
        tokens, ending = int(rows.length.sum()), Ending.STATES
        if tokens > len(lines.rows):  # some compute more than they draw from
            return graphs.find(tokens, ending, True, shared is not None) if graphs.suits(rows) else None
        if drawing is not None:
            drawn = Ending.SAMPLED if drawing.random.any() else Ending.LIKELIEST
            ending = drawn if drawing.penalties is None else Ending.PENALIZED
        return graphs.find(tokens, ending, lines.verifies, shared is not None)

    def _replay(
        self,
        graphs: GraphedSteps,
        variant: Variant,
        plan: StepPlan,
        columns: Columns,
        drawing: Drawing | None,
        shared: RowGroups | None,
        began: float,
    ) -> Launched:
        """Compute a step by a graph, and sample its tokens if the graph does not."""
        rows, lines, drawn_at = columns
        growth = self._slots.grow(plan.rows)
        self._slots.check(rows)
        if self._states is not None:
            for slot, end in self._states.after(rows.slot, rows.start, rows.end).items():
                self._states.ends[slot] = end
        failures = self._sampling.failures(plan.rows)
        tokens, computing, sampled = int(rows.length.sum()), lines, None
        if tokens > len(lines.rows):
            computing = every_token(rows, self._sampling.drafts_of(plan.rows))
        prepared = time.perf_counter()
        graphs.launch(variant, computing, growth, drawing, shared)
        computed, forward = time.perf_counter(), self.seconds["forward"]
        arriving: Arriving
        if variant.ending is Ending.STATES:
            arriving = download = Download(self._device)
            hidden = self._lines(graphs.states(tokens), np.arange(tokens), drawn_at)
            if len(lines.rows):
                sampled = self._sampling.sample(hidden, lines, failures, download)
            download.seal()
        else:
            arriving = graphs.fetch(variant, len(lines.rows))
            counting = 1 if lines.verifies else None
            sampled = Sampled(lines.rows.tolist(), 0, counting, set(), [], ())
        self.seconds["prepare"] += prepared - began
        self.seconds["sample"] += time.perf_counter() - computed - (self.seconds["forward"] - forward)
        self.seconds["forward"] += computed - prepared
        return Launched(plan.step, len(plan.rows), failures, arriving, sampled)

    def _compute(
        self, plan: StepPlan, columns: Columns, known: Sequence[Ints], began: float
    ) -> Launched | Callable[[], Launched]:
        """Compute a step operation by operation."""
        rows, lines, sampled_at = columns
        # 1. Block tables grow, and drafts are written behind the known tokens, where the forward pass reads them.
        self._slots.extend(plan.rows)
        if lines.verifies:
            (drafts,) = upload(self._device, lines.drafts)
            self._slots.append(lines.slots, lines.positions, drafts)
        if self._ahead is not None:
            self._ahead.begin(self._slots.reached)
        # 2. At which packed positions states are needed: to sample from, and to score prompts. The LM head is large,
        #    so it sees no others.
        spans = self._sampling.spans(rows)
        wanted, scored_at = sampled_at, spans
        if spans.size:
            scored_at = np.repeat(np.cumsum(rows.length) - rows.length, spans) + ramps(spans)
            wanted = np.sort(np.concatenate([sampled_at, scored_at]))
        if self._head is not None and self._head.reads_last:
            wanted = np.arange(rows.length.sum())
        # 3. Pack the rows; only background work may be interrupted.
        batch = self._slots.pack(rows, wanted, self.interrupt if self._breakable and plan.idle else None)
        if self._head is not None:
            batch = replace(batch, taps=self._head.tapping(batch))
        if self._states is not None:
            ahead = None
            if plan.ahead:
                ahead = np.array([plan.ahead.get(row, 0) for row in range(len(plan.rows))], dtype=np.int64)
            batch = replace(batch, slots=rows.slot, ahead=ahead)
        batch = self._images.added(self._adapters.added(batch, rows.length), rows)
        if self._followers is not None:
            self._followers.execute(plan, known, wanted)

        # 4. The forward pass, which also gives the tokens if all are the likeliest ones.
        prepared = time.perf_counter()
        try:
            if not scored_at.size and (taken := self._sampling.greedy(batch, self._kv, lines)) is not None:
                self.seconds["prepare"] += prepared - began
                return Launched(plan.step, len(plan.rows), self._sampling.failures(plan.rows), *taken)
            hidden = self._decoder.hidden(batch, self._kv)
        except StepInterrupted:
            return Launched(plan.step, 0, {}, Download(self._device), broken_off=True)
        self.seconds["prepare"] += prepared - began
        self.seconds["forward"] += time.perf_counter() - prepared
        # 5. Draw the tokens: now, or when a pipeline's last stage has computed the states.
        at = _Positions(wanted, sampled_at, scored_at, spans)
        end = partial(self._draw, plan, rows, lines, hidden, at, batch.taps)
        return end if self._pipelined else end()

    def _draw(
        self,
        plan: StepPlan,
        rows: Rows,
        lines: Lines,
        hidden: torch.Tensor,
        at: _Positions,
        taps: Taps | None,
    ) -> Launched:
        """Draw the tokens of a step from its states, and score its prompts."""
        wanted, sampled_at, scored_at, spans = at
        began = time.perf_counter()
        if self._followers is not None:
            self._followers.arrive()
        computed, download = time.perf_counter(), Download(self._device)
        self.seconds["forward"] += computed - began

        failures = self._sampling.failures(plan.rows)
        forward, sampled = self.seconds["forward"], None
        if sampled_at.size:
            sampled = self._sampling.sample(
                self._lines(hidden, wanted, sampled_at), lines, failures, download
            )
        prompt_scores: tuple[Scores, ...] = ()
        if scored_at.size:
            prompt_scores = self._sampling.score_prompts(
                self._lines(hidden, wanted, scored_at), rows, spans, download
            )
        if self._head is not None and taps is not None:
            self._head.observe(rows, taps)
        if self._followers is not None:
            self._followers.end()
        download.seal()  # queues the copies to the host; only `collect` waits for them
        done = time.perf_counter()
        self.seconds["sample"] += done - computed - (self.seconds["forward"] - forward)
        prompt_spans = tuple((row, span) for row, span in enumerate(spans.tolist()) if span)
        return Launched(plan.step, len(plan.rows), failures, download, sampled, prompt_spans, prompt_scores)

    def _admit(self, entry: Entry) -> Ints:
        """Fill the entry's slot; returns the tokens in it."""
        if self._head is not None:
            self._head.admit(entry)
        self._images.admit(entry)
        tokens = self._sampling.admit(entry)
        self._slots.admit(entry, tokens)
        return tokens

    def _append(self, slots: Ints, positions: Ints, tokens: torch.Tensor | Ints) -> None:
        self._slots.append(slots, positions, tokens)
        if self._followers is not None:
            assert isinstance(tokens, torch.Tensor)  # their steps are `apart`, never `StepSampling.greedy`
            self._followers.append(slots, positions, tokens)

    def _move(self, moves: tuple[Move, ...]) -> None:
        move_blocks(moves, self._kv, self._mover, self._states)
        if moves and self._head is not None:
            self._head.copy_blocks([move.source for move in moves], [move.target for move in moves])

    def _lines(self, hidden: torch.Tensor, wanted: Ints, some: Ints) -> torch.Tensor:
        """The states at the packed positions ``some``, taken from those at ``wanted`` (ascending)."""
        if some.size == wanted.size:
            return hidden
        (at,) = upload(self._device, np.searchsorted(wanted, some))
        return hidden.index_select(0, at)
