"""The local runner: executes a plan as one packed forward pass and one batch of sampled tokens.

```
 plan.entries -> slots, sampler      plan.rows -> Batch -> decoder -> logits (only where wanted)
 plan.moves   -> mover               logits -> sampler -> tokens -> slots   (stay on the device)
                                                          `-> Download -> StepOutput   (in `collect`)
```
It does not know requests or why a row was planned. On CUDA `launch` only queues work, and `collect` is the one place
that waits. On a CPU `background` runs the work on its own thread, so that planning the next step overlaps with it.
A row with drafts wants the logits of several positions: see `sampling.lines`.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from headrace.compute.batch import Batch
from headrace.compute.grammar.matchers import Matchers
from headrace.compute.kv import PagedKV
from headrace.compute.memory_clearing import MemoryClearing
from headrace.compute.mover import Mover
from headrace.compute.results import Launched, Sampled, output_of
from headrace.compute.sampling.allowed import Allowed
from headrace.compute.sampling.choice import Choice
from headrace.compute.sampling.lines import NO_DRAFT, Lines, drafted
from headrace.compute.sampling.logprobs import Scores, score
from headrace.compute.sampling.penalties import Penalty
from headrace.compute.sampling.sampler import Sampler
from headrace.compute.slots import Ints, Rows, Slots, ramps
from headrace.compute.step_interrupt import StepInterrupt, StepInterrupted
from headrace.compute.transfer import Download, upload
from headrace.core.constraint import FAILED_PREFIX
from headrace.core.plan import Entry, Move, Row, StepOutput, StepPlan, Tier


class Decoder(Protocol):
    """What the runner needs from a model."""

    def hidden(self, batch: Batch, kv: PagedKV) -> torch.Tensor:
        """Write the batch's keys and values into ``kv``; return the last states [S, hidden] of the wanted positions."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab] of hidden states."""
        ...

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The first token int64 [S] of each row's largest logit, or a fault: see `draw.likeliest`."""
        ...

    def restrict(self, logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
        """``logits`` without what grammars do not allow: see `allowed.restrict`."""
        ...

    def choose(self, logits: torch.Tensor, choice: Choice) -> torch.Tensor:
        """A token int64 [S] sampled from each row's logits, or a fault: see `choice.choose`."""
        ...

    def penalize(self, logits: torch.Tensor, counts: torch.Tensor, penalty: Penalty) -> None:
        """Penalize rows of logits in place: see `penalties.penalize`."""
        ...

    def accept(
        self, drawn: torch.Tensor, drafts: torch.Tensor, first: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Which of the drawn tokens count: see `lines.counting_of`."""
        ...


class LocalRunner:
    """`core.ports.Runner` on one device.

    ``seconds`` sums the host's time per phase since the start: ``prepare`` (slots, moves, packing), ``forward``,
    ``sample`` (including storing the tokens) and ``collect`` (waiting and converting results). On CUDA the first
    three are the time to queue the work, and the device's time shows in ``collect``. ``bell`` interrupts idle plans
    if they are ``breakable``: when each plan is collected before the next is launched.
    ``matchers`` hold the grammars of structured outputs; without them such a request fails.
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
    ) -> None:
        self.seconds = dict.fromkeys(("prepare", "forward", "sample", "collect"), 0.0)
        self.bell = StepInterrupt()
        self._breakable = breakable
        self._decoder = decoder
        self._kv = kv
        self._vocab_size = vocab_size
        self._mover = mover
        self._ahead = ahead
        self._matchers = matchers
        self._device = device
        self._slots = Slots(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=kv.block_size, device=device
        )
        drawing = (decoder.likeliest, decoder.choose, decoder.restrict)
        # A CPU finds the few tokens of a row's own sequence faster than it reads a whole row of counts.
        penalize = None if device.type == "cpu" else decoder.penalize
        self._sampler = Sampler(self._slots.tokens, vocab_size, *drawing, penalize)
        self._most_logits = max_num_seqs  # rows of logits at once, as sized at start-up
        self._refused: dict[int, str] = {}
        # Alternatives per sampled token and per prompt token (-1: no scores), and positions to score.
        self._top = np.full(max_num_seqs, -1, dtype=np.int64)
        self._prompt_top = np.full(max_num_seqs, -1, dtype=np.int64)
        self._prompt_end = np.zeros(max_num_seqs, dtype=np.int64)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-runner") if background else None
        self._launched: deque[Future[Launched]] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        """Start a plan. It never raises for the plan's work: `collect` raises its exception."""
        if self._thread is not None:
            self._launched.append(self._thread.submit(self._execute, plan))
            return
        future: Future[Launched] = Future()
        try:
            future.set_result(self._execute(plan))
        except Exception as error:
            future.set_exception(error)
        self._launched.append(future)

    def collect(self) -> StepOutput:
        """Wait for the oldest launched plan and return its output; raises what its forward pass raised."""
        began = time.perf_counter()
        try:
            launched = self._launched.popleft().result()
            output = output_of(launched)
            if self._mover is not None:
                output = output._replace(arrivals=self._mover.arrivals(wait=launched.waits))
            return output
        finally:
            if self._ahead is not None and not self._launched:
                self._ahead.rest()
            self.seconds["collect"] += time.perf_counter() - began

    def close(self) -> None:
        """Finish the launched plans and end the background thread."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._matchers is not None:
            self._matchers.close()
        if self._mover is not None:
            self._mover.close()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> Launched:
        began = time.perf_counter()
        for entry in plan.entries:
            self._admit(entry)
        self._move(plan.moves)
        download = Download(self._device)
        if not plan.rows:
            return Launched(plan.step, 0, {}, download, waits=plan.waits)
        rows = Rows.of(plan.rows)
        self._slots.extend(plan.rows)
        if self._ahead is not None:
            self._ahead.begin(self._slots.reached)
        last = np.cumsum(rows.length) - 1
        lines = self._draft(plan.rows, rows)
        sampled_at = last[lines.rows]
        if lines.verifies:
            sampled_at += lines.offsets - rows.drafts[lines.rows]
        wanted = sampled_at
        spans = self._spans(rows)
        scored_at = np.repeat(last + 1 - rows.length, spans) + ramps(spans) if spans.size else spans
        if scored_at.size:
            wanted = np.sort(np.concatenate([sampled_at, scored_at]))
        batch = self._slots.pack(rows, wanted, self.bell if self._breakable and plan.idle else None)

        prepared = time.perf_counter()
        try:
            hidden = self._decoder.hidden(batch, self._kv)
        except StepInterrupted:
            return Launched(plan.step, 0, {}, download, broken_off=True)
        computed = time.perf_counter()
        self.seconds["forward"] += computed - prepared

        failures = self._failures(plan.rows)
        forward, sampled = self.seconds["forward"], None
        if sampled_at.size:
            sampled = self._sample(self._lines(hidden, wanted, sampled_at), lines, failures, download)
        prompt_scores: tuple[Scores, ...] = ()
        if scored_at.size:
            prompt_scores = self._score_prompts(self._lines(hidden, wanted, scored_at), rows, spans, download)
        download.seal()
        done = time.perf_counter()
        self.seconds["prepare"] += prepared - began
        self.seconds["sample"] += done - computed - (self.seconds["forward"] - forward)
        prompt_spans = tuple((row, span) for row, span in enumerate(spans.tolist()) if span)
        return Launched(plan.step, len(plan.rows), failures, download, sampled, prompt_spans, prompt_scores)

    def _spans(self, rows: Rows) -> Ints:
        """Number of positions of each row that need scores of the prompt's next token; empty if none does."""
        ends = self._prompt_end[rows.slot]
        return np.maximum(np.minimum(rows.end, ends) - rows.start, 0) if ends.any() else ends[:0]

    def _failures(self, rows: tuple[Row, ...]) -> dict[int, str]:
        if not self._refused:
            return {}
        return {row: self._refused[each.slot] for row, each in enumerate(rows) if each.slot in self._refused}

    def _admit(self, entry: Entry) -> None:
        self._refused.pop(entry.slot, None)
        params = entry.params
        self._top[entry.slot] = -1 if params.logprobs is None else params.logprobs
        self._prompt_top[entry.slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self._prompt_end[entry.slot] = 0 if params.prompt_logprobs is None else entry.prompt_tokens - 1
        try:
            self._constrain(entry)
            tokens = self._sampler.admit(entry)
        except Exception as error:  # an invalid request must fail alone
            self._refused[entry.slot] = str(error)
            tokens = np.zeros(len(entry.tokens), dtype=np.int64)
        self._slots.admit(entry, tokens)

    def _constrain(self, entry: Entry) -> None:
        if self._matchers is not None:
            self._matchers.admit(entry)
        elif entry.params.structured_outputs is not None:
            raise ValueError(f"{FAILED_PREFIX}this server has no grammar engine")

    def _move(self, moves: tuple[Move, ...]) -> None:
        if self._mover is not None:
            self._mover.move(moves)
        elif moves:
            if any(move.source_tier != Tier.DEVICE or move.target_tier != Tier.DEVICE for move in moves):
                raise ValueError("this runner has no lower tiers: blocks cannot leave the device")
            self._kv.copy_blocks([move.source for move in moves], [move.target for move in moves])

    def _lines(self, hidden: torch.Tensor, wanted: Ints, some: Ints) -> torch.Tensor:
        """The states at the packed positions ``some``, taken from those at ``wanted`` (ascending)."""
        if some.size == wanted.size:
            return hidden
        (at,) = upload(self._device, np.searchsorted(wanted, some))
        return hidden.index_select(0, at)

    def _draft(self, plan_rows: tuple[Row, ...], rows: Rows) -> Lines:
        """Store the drafts of the rows; returns the lines of logits of all rows."""
        sampling = np.flatnonzero(rows.samples)
        if not any(row.drafts for row in plan_rows):
            none = np.zeros(len(sampling), dtype=np.int64)
            return Lines(sampling, rows.slot[sampling], rows.end[sampling], none, none, False)
        drafts = drafted(plan_rows, self._vocab_size)
        self._slots.draft(rows, drafts)
        if self._matchers is not None:
            self._matchers.walk({row.slot: row.drafts for row in plan_rows if row.drafts})
        counts = 1 + rows.drafts[sampling]
        at, offsets = np.repeat(sampling, counts), ramps(counts)
        expected = np.full(len(at), NO_DRAFT, dtype=np.int64)
        expected[offsets < rows.drafts[at]] = drafts
        return Lines(at, rows.slot[at], rows.known[at] + offsets, offsets, expected, True)

    def _sample(
        self, hidden: torch.Tensor, lines: Lines, failures: dict[int, str], download: Download
    ) -> Sampled:
        """Draw the tokens of all lines, in parts, because the logits of many drafts would not fit at once."""
        allowed = self._allowed(lines, failures)
        if allowed is not None and lines.verifies and self._matchers is not None:
            lines = lines.cut(self._matchers.legal())
        drafts = lines.before() if self._sampler.penalizes else None
        tokens: list[torch.Tensor] = []
        scores: list[Scores] = []
        scored: list[int] = []
        for begin in range(0, len(lines.rows), self._most_logits):
            part = slice(begin, begin + self._most_logits)
            whole = len(lines.rows) <= self._most_logits
            some = lines if whole else lines.part(part)
            own = allowed if whole or allowed is None else allowed.part(begin, part.stop)
            logits = self._logits(hidden[part])
            drawn = self._draw(logits, some, own, None if drafts is None else drafts[part], failures)
            tokens.append(drawn)
            top = self._top[some.slots]
            at = np.flatnonzero(top >= 0)
            if at.size:
                (at_,) = upload(self._device, at)
                chosen = drawn.index_select(0, at_).clamp_(min=0)
                scores.append(score(logits.index_select(0, at_).float(), chosen, top[at], download))
                scored += (begin + at).tolist()
            del logits
        drawn = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        counting = lines.counting(drawn, self._decoder.accept) if lines.verifies else None
        self._slots.append(lines.slots, lines.positions, drawn)
        self._sampler.append(lines.slots, drawn, counting)
        if self._matchers is not None:
            self._matchers.note(lines.slots, drawn, counting)
        constrained = set() if allowed is None else set(lines.rows[allowed.lines].tolist())
        counted = None if counting is None else download.add(counting)
        return Sampled(lines.rows.tolist(), download.add(drawn), counted, constrained, scored, tuple(scores))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        logits = self._decoder.logits(hidden)
        self.seconds["forward"] += time.perf_counter() - began
        return logits

    def _draw(
        self,
        logits: torch.Tensor,
        lines: Lines,
        allowed: Allowed | None,
        drafts: Ints | None,
        failures: dict[int, str],
    ) -> torch.Tensor:
        """A token for each of ``lines``: all together, or one by one if the batch raises."""
        try:
            return self._sampler.sample(logits, lines.slots, lines.positions, allowed, drafts)
        except Exception:
            each = logits if allowed is None else self._decoder.restrict(logits, allowed)
            return self._sample_alone(each, lines, drafts, failures)

    def _allowed(self, lines: Lines, failures: dict[int, str]) -> Allowed | None:
        """What grammars leave to draw from; rows whose grammar has failed are added to ``failures``."""
        found = None if self._matchers is None else self._matchers.allowed(lines.slots, lines.offsets)
        if found is None:
            return None
        allowed, failed = found
        for line, reason in failed.items():
            failures.setdefault(int(lines.rows[line]), reason)
        return allowed

    def _sample_alone(
        self, logits: torch.Tensor, lines: Lines, drafts: Ints | None, failures: dict[int, str]
    ) -> torch.Tensor:
        """Sample line by line after the batch raised: rows that raise again fail, the others continue.

        A line behind a draft only does not count: what raises there raises again when it is the row's first.
        """
        drawn = torch.zeros(len(lines.rows), dtype=torch.int64, device=self._device)
        for line in range(len(lines.rows)):
            one = slice(line, line + 1)
            before = None if drafts is None else drafts[one]
            try:
                drawn[one] = self._sampler.sample(
                    logits[one], lines.slots[one], lines.positions[one], drafts=before
                )
            except Exception as error:
                if lines.offsets[line]:
                    drawn[one] = NO_DRAFT
                else:
                    failures[int(lines.rows[line])] = f"sampling failed: {error}"
        return drawn

    def _score_prompts(
        self, hidden: torch.Tensor, rows: Rows, spans: Ints, download: Download
    ) -> tuple[Scores, ...]:
        """Scores of the token after each state, in parts, because all logits of a long prompt would not fit at once."""
        slots = np.repeat(rows.slot, spans)
        following = np.repeat(rows.start, spans) + ramps(spans) + 1
        scores = []
        for begin in range(0, len(hidden), self._most_logits):
            part = slice(begin, begin + self._most_logits)
            tokens = self._slots.tokens_at(slots[part], following[part])
            logits = self._decoder.logits(hidden[part]).float()
            scores.append(score(logits, tokens, self._prompt_top[slots[part]], download))
        return tuple(scores)
