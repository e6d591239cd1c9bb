"""The state of each slot's grammar, and the tokens that it allows next, computed while the model computes.

```
 step n    sample ── tokens ──> note ─────┐
                                           │ the worker: consume the token, compute the next mask
 step n+1  prepare, forward ...            │ (without the interpreter lock)
           sample <─────── allowed <───────┘
```
A matcher advances by drawn tokens in the order of their positions, and a sequence that takes a slot brings all of its
tokens with it, so that a preempted one goes on as if nothing had happened. One worker does everything in order: what a
slot's last sequence left to do is done before its next one begins. A grammar that fails fails its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor

from headrace.compute.grammar.compiler import Compiler
from headrace.compute.grammar.reasoning import SequenceMatcher
from headrace.compute.grammar.refusals import first_reason
from headrace.compute.sampling.allowed import Allowed
from headrace.compute.transfer import Download
from headrace.core.constraint import FAILED_PREFIX, UnusableConstraint
from headrace.core.plan import Entry

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

EVERYTHING = -1
"""A word of a mask that allows all its tokens."""


class Matchers:
    """The matchers of all slots over the grammars of ``compiler``.

    ``waited_seconds`` sums what sampling has waited for masks.
    """

    def __init__(self, compiler: Compiler, max_num_seqs: int) -> None:
        self._compiler = compiler
        self._matchers: dict[int, SequenceMatcher] = {}
        self._failures: dict[int, str] = {}
        self._ending = np.zeros(max_num_seqs, dtype=np.bool_)
        self._words = np.zeros((max_num_seqs, -(-compiler.vocab_size // 32)), dtype=np.int32)
        self._executor = LLExecutor(num_threads=1)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headrace-masks")
        self._last: Future[None] | None = None

    def close(self) -> None:
        """End the worker."""
        self._worker.shutdown()

    def admit(self, entry: Entry) -> None:
        """A sequence takes a slot, with a constraint or without.

        Raises:
            UnusableConstraint: its grammar cannot be compiled.
        """
        constraint = entry.params.structured_outputs
        if constraint is None:
            if self._matchers:
                self._release(entry.slot)
            return
        self._release(entry.slot)
        try:
            matcher = self._compiler.follow(constraint)
        except UnusableConstraint as error:
            raise UnusableConstraint(f"{FAILED_PREFIX}{error}") from error
        self._matchers[entry.slot] = matcher
        self._submit([(entry.slot, matcher, entry.tokens[entry.prompt_tokens :])])

    def note(self, slots: Ints, drawn: torch.Tensor) -> None:
        """The rows of ``slots`` [S] have drawn tokens (int64 [S], negative for a fault)."""
        if not self._matchers:
            return
        lines = [line for line, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if not lines:
            return
        if drawn.device.type == "cpu":
            tokens = drawn[lines].tolist()
            work = [
                (slot, self._matchers[slot], (token,))
                for slot, token in zip(slots[lines].tolist(), tokens, strict=True)
                if self._goes_on(token)
            ]
            self._submit(work)
            return
        download = Download(drawn.device)
        download.add(drawn)
        download.seal()
        owners = [
            (line, slot, self._matchers[slot])
            for line, slot in zip(lines, slots[lines].tolist(), strict=True)
        ]
        self._last = self._worker.submit(self._note_later, download, owners)

    def allowed(self, slots: Ints) -> tuple[Allowed, dict[int, str]] | None:
        """What each constrained row of ``slots`` [S] may draw, and by row why it can draw nothing; None: no such row.

        A row that fails may draw anything, so that the batch goes on.
        """
        if not self._matchers:
            return None
        lines = [line for line, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if not lines:
            return None
        if self._last is not None:
            self._last.result()
        at = np.array(lines, dtype=np.int64)
        words = self._words[slots[at]]
        failures = {}
        for place, (line, slot) in enumerate(zip(lines, slots[at].tolist(), strict=True)):
            if slot in self._failures:
                failures[line] = FAILED_PREFIX + self._failures[slot]
                words[place] = EVERYTHING
        return Allowed(at, words, self._ending[slots[at]]), failures

    def _release(self, slot: int) -> None:
        """Whoever held the slot is gone; work for it that is under way goes on without effect."""
        if self._matchers.pop(slot, None) is not None:
            if self._last is not None:
                self._last.result()
            self._failures.pop(slot, None)

    def _goes_on(self, token: int) -> bool:
        """Whether a grammar follows what was drawn: no fault, and not the end, behind which its mask stays."""
        return token >= 0 and token not in self._compiler.ends

    # -- the worker ---------------------------------------------------------------------------------

    def _submit(self, work: Sequence[tuple[int, SequenceMatcher, Sequence[int]]]) -> None:
        if work:
            self._last = self._worker.submit(self._advance, work)

    def _note_later(self, download: Download, owners: list[tuple[int, int, SequenceMatcher]]) -> None:
        tokens = download.wait()[0].tolist()
        work = [
            (slot, matcher, (tokens[line],)) for line, slot, matcher in owners if self._goes_on(tokens[line])
        ]
        if work:
            self._advance(work)

    def _advance(self, work: Sequence[tuple[int, SequenceMatcher, Sequence[int]]]) -> None:
        """Consume tokens and compute what may follow; errors are kept for their slots."""
        try:
            going = [
                (slot, matcher)
                for slot, matcher, tokens in work
                if matcher.consume(tokens) or self._fail(slot, matcher)
            ]
            self._compute([(slot, matcher) for slot, matcher in going if matcher.forced is None])
            for slot, matcher in going:
                if (token := matcher.forced) is not None:
                    self._words[slot] = 0
                    self._words[slot].view(np.uint32)[token // 32] = 1 << token % 32
                self._ending[slot] = matcher.stopped
                if matcher.error:
                    self._fail(slot, matcher)
        except BaseException as error:  # a panic of the library is no Exception
            for slot, _, _ in work:
                self._failures[slot] = f"the grammar engine failed: {type(error).__name__}: {error}"

    def _compute(self, going: Sequence[tuple[int, SequenceMatcher]]) -> None:
        """The masks of what the grammars allow; without a grammar, everything."""
        grammars = [(matcher.grammar, slot) for slot, matcher in going if matcher.grammar is not None]
        for slot, matcher in going:
            if matcher.grammar is None:
                self._words[slot] = EVERYTHING
        if grammars:
            self._executor.unsafe_compute_mask_ptr(
                grammars,
                self._words.ctypes.data,
                self._words.shape[1] * self._words.itemsize,
                len(self._words),
            )

    def _fail(self, slot: int, matcher: SequenceMatcher) -> bool:
        reason = first_reason(matcher.error)
        self._failures[slot] = f"the grammar became too complex or refused a token: {reason}"
        return False
