"""Tokens that grammars force next: published by the worker that follows the grammars, read where drafts are chosen.

```
 the worker      consume what was drawn ─► publish (recent tokens, forced tokens) ─► compute the masks
                                                    │
 the scheduler   known tokens ──────────────────────┴─► the tokens that follow them, as drafts (`core.drafting.forced`)
```
The worker may be ahead of the scheduler (a step is in flight) or behind it (it still consumes). A run therefore begins
a few tokens before its matcher's position, and is matched against the tokens that the scheduler knows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from headrace.compute.grammar.reasoning import SequenceMatcher
from headrace.core.drafting.proposal import DraftRow

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
