"""The state of each slot's grammar, and the tokens that it allows next, computed while the model computes.

```
 step n    sample ── tokens ──> note ─────┐
                                           │ the worker: consume the token, compute the next mask
 step n+1  prepare, forward ...            │ (without the interpreter lock)
           sample <─────── allowed <───────┘
```
A matcher advances by sampled tokens in the order of their positions. A sequence that takes a slot brings all of its
tokens, so a preempted one continues correctly. One worker does everything in order: pending work of a slot's previous
sequence is done before the next one begins. A failing grammar fails only its own row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor

from headrace.compute.batch import Ints
from headrace.compute.grammar.compiler import Compiler, SequenceMatcher
from headrace.compute.grammar.rules import first_reason
from headrace.compute.sampling.penalties import Allowed
from headrace.compute.transfer import Download
from headrace.core.constraint import FAILED_PREFIX, UnusableConstraint
from headrace.core.drafting.proposal import DraftRow
from headrace.core.plan import Entry

# Tokens that grammars force next: published by the worker that follows the grammars, read where drafts are chosen.
#
#  the worker      consume what was drawn ─► publish (recent tokens, forced tokens) ─► compute the masks
#                                                     │
#  the scheduler   known tokens ──────────────────────┴─► the tokens that follow them, as drafts
# (`core.drafting.forced`) The worker may be ahead of the scheduler (a step is in flight) or behind it (it still
# consumes). A run therefore begins a few tokens before its matcher's position, and is matched against the tokens that
# the scheduler knows.

LONGEST = 32
"""Maximum number of forced tokens published at once; a longer run continues later."""

RECENT = 8
"""Number of sampled tokens before a run; it must be at least the number of tokens in flight."""

COOLS = 8
"""After this many unforced tokens, as in free text, steps no longer wait for a request; its forced tokens then come a
step later."""

PATIENCE_SECONDS = 0.002  # see docs/decisions/speculative-decoding.md#forced-tokens-as-drafts
"""Maximum time that a step waits for the worker; a later run is used in the next step."""


class _Run:
    """``recent`` and ``forced`` tokens of one request, before and after its first ``drawn`` tokens of output.

    ``free`` counts the tokens since the last forced one. ``late``: a step's wait for it timed out, so no step waits
    again until the worker continues.
    """

    __slots__ = ("drawn", "forced", "free", "late", "recent")

    def __init__(self) -> None:
        self.drawn = 0
        self.recent: tuple[int, ...] = ()
        self.forced: tuple[int, ...] = ()
        self.free = 0
        self.late = False

    def after(self, tokens: Sequence[int], known: int) -> tuple[int, ...]:
        """The forced tokens after ``tokens`` (the last ``known`` are output); empty if the run does not match."""
        run = self.recent + self.forced
        place = known - self.drawn + len(self.recent)
        if not 0 <= place < len(run) or tuple(tokens[len(tokens) - place :]) != run[:place]:
            return ()
        return run[place:]


class ForcedRuns:
    """The runs of all requests that follow a grammar. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: dict[str, _Run] = {}
        self._followed: dict[SequenceMatcher, tuple[str, _Run]] = {}
        self._warm: set[_Run] = set()

    @property
    def idle(self) -> bool:
        """See `core.drafting.forced.ForcedTokens`."""
        return not self._warm

    # -- for the runner and its worker ---------------------------------------------------------------

    def begin(self, matcher: SequenceMatcher, request_id: str) -> None:
        """Assign ``matcher`` to a request; it has consumed no output yet."""
        run = _Run()
        with self._changed:
            self._runs[request_id] = run
            self._followed[matcher] = request_id, run
            self._warm.add(run)

    def release(self, matcher: SequenceMatcher) -> None:
        """Unassign ``matcher``; another one may be assigned to its request."""
        with self._changed:
            request_id, run = self._followed.pop(matcher)
            self._warm.discard(run)
            if self._runs.get(request_id) is run:
                del self._runs[request_id]

    def publish(self, consumed: Iterable[tuple[SequenceMatcher, Sequence[int]]]) -> None:
        """Publish the runs of matchers after they consumed these tokens."""
        news = [(matcher, tokens, matcher.forced_run()) for matcher, tokens in consumed]
        with self._changed:
            for matcher, tokens, forced in news:
                request_id, run = self._followed[matcher]
                run.drawn += len(tokens)
                run.recent = (*run.recent, *tokens)[-RECENT:]
                run.forced = tuple(forced[:LONGEST])
                run.free = 0 if forced else run.free + len(tokens)
                run.late = False
                if run.free >= COOLS:
                    self._warm.discard(run)
                elif self._runs.get(request_id) is run:
                    self._warm.add(run)
            self._changed.notify_all()

    # -- for the scheduler ---------------------------------------------------------------------------

    def forced_tokens(self, draft_rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """See `core.drafting.forced.ForcedTokens`."""
        with self._changed:
            found = [(draft_row, self._runs.get(draft_row.request.id)) for draft_row in draft_rows]
            awaited = [
                (run, len(draft_row.tokens) - len(draft_row.request.tokens))
                for draft_row, run in found
                if run in self._warm and not run.late
            ]
            if not self._changed.wait_for(
                lambda: all(run.drawn >= known for run, known in awaited), PATIENCE_SECONDS
            ):
                for run, known in awaited:
                    run.late = run.drawn < known
            return [
                ()
                if run is None
                else run.after(draft_row.tokens, len(draft_row.tokens) - len(draft_row.request.tokens))
                for draft_row, run in found
            ]

    def ended(self, request_id: str) -> None:
        """A request left the engine."""
        with self._changed:
            run = self._runs.pop(request_id, None)
            if run is not None:
                self._warm.discard(run)


Masks = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

EVERYTHING = -1
"""A word of a mask that allows all its tokens."""


class _Walk:
    """The masks after each ``legal`` token of a draft; ``error`` is set if an error ended the walk."""

    __slots__ = ("ending", "error", "legal", "words")

    def __init__(self, length: int, width: int) -> None:
        self.legal = 0
        self.error: BaseException | None = None
        self.words = np.zeros((length, width), dtype=np.int32)
        self.ending = np.zeros(length, dtype=np.bool_)


class Matchers:
    """The matchers of all slots over the grammars of ``compiler``.

    ``forced`` publishes the tokens that they force next.
    """

    def __init__(self, compiler: Compiler, max_num_seqs: int) -> None:
        self.forced = ForcedRuns()
        self._compiler = compiler
        self._matchers: dict[int, SequenceMatcher] = {}
        self._failures: dict[int, str] = {}
        self._ending = np.zeros(max_num_seqs, dtype=np.bool_)
        self._words = np.zeros((max_num_seqs, -(-compiler.vocab_size // 32)), dtype=np.int32)
        self._walks: dict[int, _Walk] = {}
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
        self.forced.begin(matcher, entry.request_id)
        self._submit([(entry.slot, matcher, entry.tokens[entry.prompt_tokens :])])

    def walk(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Compute the masks along the drafts of some slots.

        A copy of each matcher follows the draft up to its first token that is not allowed. The matcher itself advances
        only by accepted tokens.
        """
        self._walks = {}
        work = [
            (
                self._matchers[slot],
                tokens,
                self._walks.setdefault(slot, _Walk(len(tokens), self._words.shape[1])),
            )
            for slot, tokens in drafts.items()
            if slot in self._matchers
        ]
        if work:
            self._last = self._worker.submit(self._walk, work)

    def note(self, slots: Ints, drawn: torch.Tensor, counting: torch.Tensor | None = None) -> None:
        """Advance the matchers of ``slots`` [S] by sampled tokens (int64 [S], negative for a fault).

        If ``counting`` (bool [S]) is given, slots may occur more than once, in consecutive lines, and only tokens for
        which it is true count.
        """
        if not self._matchers:
            return
        lines = [line for line, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if not lines:
            return
        owners = [
            (line, slot, self._matchers[slot])
            for line, slot in zip(lines, slots[lines].tolist(), strict=True)
        ]
        if drawn.device.type == "cpu":
            self._submit(self._consumed(owners, drawn, counting))
            return
        download = Download(drawn.device)
        download.add(drawn)
        if counting is not None:
            download.add(counting)
        download.seal()
        self._last = self._worker.submit(self._note_later, download, owners)

    def follow(self, slots: Ints) -> bool:
        """Whether any of ``slots`` has a grammar."""
        return bool(self._matchers) and any(slot in self._matchers for slot in slots.tolist())

    def allowed(self, slots: Ints, offsets: Ints | None = None) -> tuple[Allowed, dict[int, str]] | None:
        """The allowed tokens of the constrained rows of ``slots`` [S], and errors by row; None if none is constrained.

        ``offsets`` [S] counts the drafts of a slot before the row (None: no drafts). A failed row may sample anything,
        so that the batch continues; so may a row behind a draft that is not allowed.
        """
        if not self._matchers:
            return None
        lines = [line for line, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if not lines:
            return None
        if self._last is not None:
            self._last.result()
        at = np.array(lines, dtype=np.int64)
        words, ending = self._words[slots[at]], self._ending[slots[at]]
        failures = {}
        for place, (line, slot) in enumerate(zip(lines, slots[at].tolist(), strict=True)):
            behind = -1 if offsets is None else int(offsets[line]) - 1
            if slot in self._failures:
                failures[line] = FAILED_PREFIX + self._failures[slot]
                words[place] = EVERYTHING
            elif behind >= 0:
                words[place], ending[place] = (
                    self._walks[slot].words[behind],
                    self._walks[slot].ending[behind],
                )
        return Allowed(at, words, ending), failures

    def legal(self) -> dict[int, int]:
        """By slot, how many of the drafts of the last `walk` are allowed; call it after `allowed`."""
        return {slot: each.legal for slot, each in self._walks.items()}

    def _release(self, slot: int) -> None:
        """Release a slot's matcher; pending work for it has no effect."""
        matcher = self._matchers.pop(slot, None)
        if matcher is not None:
            if self._last is not None:
                self._last.result()
            self._failures.pop(slot, None)
            self.forced.release(matcher)

    def _goes_on(self, token: int) -> bool:
        """Whether the matcher should advance by a token: not a fault, and not the end of the output."""
        return token >= 0 and token not in self._compiler.ends

    # -- the worker ---------------------------------------------------------------------------------

    def _consumed(
        self,
        owners: list[tuple[int, int, SequenceMatcher]],
        drawn: torch.Tensor,
        counting: torch.Tensor | None,
    ) -> list[tuple[int, SequenceMatcher, Sequence[int]]]:
        """The tokens for each matcher to consume; ``owners`` are lines of ``drawn`` with their slots."""
        tokens = drawn.tolist()
        counts = [True] * len(tokens) if counting is None else counting.tolist()
        consumed: dict[int, tuple[int, SequenceMatcher, list[int]]] = {}
        for line, slot, matcher in owners:
            if counts[line] and self._goes_on(tokens[line]):
                consumed.setdefault(slot, (slot, matcher, []))[2].append(tokens[line])
        return list(consumed.values())

    def _submit(self, work: Sequence[tuple[int, SequenceMatcher, Sequence[int]]]) -> None:
        if work:
            self._last = self._worker.submit(self._advance, work)

    def _note_later(self, download: Download, owners: list[tuple[int, int, SequenceMatcher]]) -> None:
        drawn, *counting = download.wait()
        work = self._consumed(owners, drawn, counting[0] if counting else None)
        if work:
            self._advance(work)

    def _walk(self, work: Sequence[tuple[SequenceMatcher, Sequence[int], _Walk]]) -> None:
        """Compute the masks along drafts; an error ends the walk, but does not fail the sequence."""
        for matcher, tokens, walk in work:
            try:
                copy = matcher.copy()
                for i, token in enumerate(tokens):
                    if not self._goes_on(token) or not copy.allows(token) or not copy.consume([token]):
                        break
                    self._compute([(i, copy)], walk.words)
                    if copy.error:
                        break
                    walk.ending[i], walk.legal = copy.stopped, i + 1
            except BaseException as error:  # a panic of the library is not an Exception
                walk.error = error  # without a mask, no draft is accepted
            finally:
                walk.words[walk.legal :] = EVERYTHING

    def _advance(self, work: Sequence[tuple[int, SequenceMatcher, Sequence[int]]]) -> None:
        """Consume tokens and compute the next masks; errors are stored by slot."""
        try:
            going = [
                (slot, matcher, tokens)
                for slot, matcher, tokens in work
                if matcher.consume(tokens) or matcher.renew() or self._fail(slot, matcher)
            ]
            self.forced.publish((matcher, tokens) for _, matcher, tokens in going)
            self._compute([(slot, matcher) for slot, matcher, _ in going], self._words)
            for slot, matcher, _ in going:
                if matcher.error and matcher.renew():
                    self._compute([(slot, matcher)], self._words)
                self._ending[slot] = matcher.stopped
                if matcher.error:
                    self._fail(slot, matcher)
        except BaseException as error:  # a panic of the library is not an Exception
            for slot, _, _ in work:
                self._failures[slot] = f"the grammar engine failed: {type(error).__name__}: {error}"

    def _compute(self, going: Sequence[tuple[int, SequenceMatcher]], words: Masks) -> None:
        """Compute the next masks in the rows of ``words``; without a grammar, all tokens are allowed."""
        grammars = []
        for row, matcher in going:
            token = matcher.forced
            if token is not None:
                words[row] = 0
                words[row].view(np.uint32)[token // 32] = 1 << token % 32
            elif matcher.grammar is None:
                words[row] = EVERYTHING
            else:
                grammars.append((matcher.grammar, row))
        if grammars:
            self._executor.unsafe_compute_mask_ptr(
                grammars, words.ctypes.data, words.shape[1] * words.itemsize, len(words)
            )

    def _fail(self, slot: int, matcher: SequenceMatcher) -> bool:
        reason = first_reason(matcher.error)
        self._failures[slot] = f"the grammar became too complex or refused a token: {reason}"
        return False
