"""From a step's last hidden states to its tokens: which lines of logits are needed, and what is drawn from them.

The lines of a step's logits: one for each sampled token, and which of these tokens count.

```
 row     known .. x | drafts r s t       a row with three drafts has four lines
 lines   after x    after r   after s   after t
 drawn   r          s         u         v         <- each as if all drafts before it were known tokens
 counts  yes        yes       yes       no        u replaces t, so tokens after t do not count
```
A sampled token counts if all drafts before it equal the tokens sampled at their positions. This is computed on the
device, so that the host does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from headrace.compute.batch import Batch, Ints, ramps
from headrace.compute.grammar.matchers import Matchers
from headrace.compute.kernels.step_arrays import StepArrays
from headrace.compute.model.kv import PagedKV
from headrace.compute.results import Arrived, Sampled
from headrace.compute.sampling.choice import NO_DRAFT, TokenChoice
from headrace.compute.sampling.logprobs import Scores, score
from headrace.compute.sampling.penalties import Allowed, Penalty
from headrace.compute.sampling.sampler import Drawing, Sampler
from headrace.compute.slots import Rows, Slots
from headrace.compute.transfer import Download, upload
from headrace.core.constraint import FAILED_PREFIX
from headrace.core.plan import Entry, Row

Accept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Lines(NamedTuple):
    """The lines as columns, int64 [L]; the lines of a row are consecutive.

    ``rows`` are indices of the plan's rows. ``positions`` are the positions of the tokens to sample in their sequences,
    ``offsets`` the number of the row's drafts before them. ``drafts`` are the drafts at these positions, `NO_DRAFT` in
    the last line of a row. ``verifies`` says whether any row has drafts.
    """

    rows: Ints
    slots: Ints
    positions: Ints
    offsets: Ints
    drafts: Ints
    verifies: bool

    def part(self, some: slice) -> Lines:
        """Some of the lines."""
        rows, slots, positions, offsets, drafts, verifies = self
        return Lines(rows[some], slots[some], positions[some], offsets[some], drafts[some], verifies)

    def cut(self, lengths: Mapping[int, int]) -> Lines:
        """The lines with the drafts of some slots cut to the given ``lengths``."""
        if not lengths:
            return self
        most = np.array([lengths.get(slot, len(self.rows)) for slot in self.slots.tolist()], dtype=np.int64)
        return self._replace(drafts=np.where(self.offsets < most, self.drafts, NO_DRAFT))

    def before(self) -> Ints | None:
        """The drafts before each line [L, K], padded with `NO_DRAFT`; None if no line has any."""
        if not self.verifies:
            return None
        places = np.arange(self.offsets.max(initial=0))
        first = np.arange(len(self.rows)) - self.offsets
        drafts = self.drafts[np.minimum(first[:, None] + places, len(self.rows) - 1)]
        return np.where(places < self.offsets[:, None], drafts, NO_DRAFT)

    def counting(self, drawn: torch.Tensor, accept: Accept) -> torch.Tensor:
        """Which of the tokens ``drawn`` int64 [L] count, as bool [L] on their device, by `counting_of` or a kernel.

        A fault after a draft does not count: the token at its place is drawn again in another step, and fails there.
        """
        known = (self.drafts, np.arange(len(self.rows)) - self.offsets, self.offsets)
        return accept(drawn, *upload(drawn.device, *known))


class Columns(NamedTuple):
    """The rows of a plan, their lines, and the packed positions ``drawn_at`` int64 [L] to sample after."""

    rows: Rows
    lines: Lines
    drawn_at: Ints


def columns_of(plan_rows: tuple[Row, ...], vocab_size: int, arrays: StepArrays | None = None) -> Columns:
    """The columns of a plan's rows (at least one), in memory of ``arrays`` if they are given."""
    if arrays is not None:
        of_rows, of_lines, verifies = arrays.columns(plan_rows, vocab_size)
        at, slots, positions, offsets, expected, after = of_lines
        return Columns(Rows(*of_rows), Lines(at, slots, positions, offsets, expected, verifies), after)
    rows = Rows.of(plan_rows)
    sampling = np.flatnonzero(rows.samples)
    counts = 1 + rows.drafts[sampling]
    at, offsets, verifies = np.repeat(sampling, counts), ramps(counts), bool(rows.drafts.any())
    drawing, end = [row for row in plan_rows if row.samples], (NO_DRAFT,)
    expected = drafted(drawing, vocab_size, end) if verifies else np.zeros_like(at)
    after = (np.cumsum(rows.length) - 1 - rows.drafts)[at] + offsets
    return Columns(
        rows, Lines(at, rows.slot[at], rows.known[at] + offsets, offsets, expected, verifies), after
    )


def every_token(rows: Rows, drafts: Ints) -> Lines:
    """All tokens of ``rows`` as lines, also those that are not sampled from; ``drafts`` are those of all rows."""
    at, offsets = np.repeat(np.arange(rows.length.size), rows.length), ramps(rows.length)
    expected = np.full(at.size, NO_DRAFT, dtype=np.int64)
    last = rows.length[at] - 1
    expected[(offsets < last) & (offsets >= last - rows.drafts[at])] = drafts
    return Lines(at, rows.slot[at], rows.start[at] + offsets + 1, offsets, expected, True)


def drafted(rows: Sequence[Row], vocab_size: int, end: tuple[int, ...] = ()) -> Ints:
    """The drafts of all ``rows``, each followed by ``end``; `NO_DRAFT` in place of a token that the model does not
    have.
    """
    tokens = [token for row in rows for token in (*row.drafts, *end)]
    return np.array([token if 0 <= token < vocab_size else NO_DRAFT for token in tokens], dtype=np.int64)


# From a step's last hidden states to its tokens and log-probabilities.
#
# It stores the requests' parameters by slot: sampling, grammars, log-probabilities. An invalid request fails alone, and
# so does a row whose sampling raises an error.


class Head(Protocol):
    """The methods of a model that sampling needs."""

    def greedy(self, batch: Batch, kv: PagedKV) -> Ints | None:
        """The forward pass of a batch and `likeliest_after` its states, int64 [S] on the host.

        None: not in one call; then nothing was done.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab] of hidden states."""
        ...

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """The first token int64 [S] of each row's largest logit, or a fault: see `choice.likeliest`."""
        ...

    def likeliest_after(self, hidden: torch.Tensor) -> torch.Tensor:
        """`likeliest` of the `logits` of hidden states."""
        ...

    def restrict(self, logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
        """``logits`` without what grammars do not allow: see `penalties.restrict`."""
        ...

    def choose(self, logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
        """A token int64 [S] sampled from each row's logits, or a fault: see `choice.choose`."""
        ...

    def penalize(self, logits: torch.Tensor, counts: torch.Tensor, penalty: Penalty) -> None:
        """Penalize rows of logits in place: see `penalties.penalize`."""
        ...

    def accept(
        self, drawn: torch.Tensor, drafts: torch.Tensor, first: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Which of the drawn tokens count: see `sampling.choice.counting_of`."""
        ...


NONE = np.zeros(0, dtype=np.int64)


class StepSampling:
    """The sampling of all slots. At most ``max_logit_rows`` rows of logits exist at once.

    ``append`` stores drawn tokens.

    With ``graphs`` the counts of penalties stay where they are, so that graphs can read and write them. The time of
    computing logits is added to ``seconds["forward"]``. ``apart``: others need the states of a step before its tokens.
    """

    def __init__(
        self,
        head: Head,
        slots: Slots,
        seconds: dict[str, float],
        *,
        vocab_size: int,
        max_logit_rows: int,
        matchers: Matchers | None,
        append: Callable[[Ints, Ints, torch.Tensor | Ints], None],
        graphs: bool,
        apart: bool,
    ) -> None:
        self._apart = apart
        self._seconds = seconds
        self._head = head
        self._slots = slots
        self._append = append
        self._vocab_size = vocab_size
        self._most_logits = max_logit_rows
        self._matchers = matchers
        # A CPU finds the few tokens of a row's own sequence faster than it reads a whole row of counts.
        penalize = None if slots.device.type == "cpu" and not graphs else head.penalize
        self._sampler = Sampler(
            slots.tokens, vocab_size, head.likeliest, head.choose, head.restrict, penalize, fixed=graphs
        )
        self._refused: dict[int, str] = {}
        # Alternatives per sampled token and per prompt token (-1: no scores), and positions to score. Nothing else is
        # looked at while no slot is `_scored`.
        self._scored = set[int]()
        self._top = np.full(len(slots.tokens), -1, dtype=np.int64)
        self._prompt_top = np.full(len(slots.tokens), -1, dtype=np.int64)
        self._prompt_end = np.zeros(len(slots.tokens), dtype=np.int64)

    @property
    def counts(self) -> torch.Tensor:
        """The counts of penalties: see `Penalties`."""
        return self._sampler.counts

    def admit(self, entry: Entry) -> Ints:
        """A sequence takes a slot; returns its tokens, or zeros if the request is invalid."""
        self._refused.pop(entry.slot, None)
        params = entry.params
        self._top[entry.slot] = -1 if params.logprobs is None else params.logprobs
        self._prompt_top[entry.slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self._prompt_end[entry.slot] = 0 if params.prompt_logprobs is None else entry.prompt_tokens - 1
        scored = params.logprobs is not None or params.prompt_logprobs is not None
        (self._scored.add if scored else self._scored.discard)(entry.slot)
        try:
            self._constrain(entry)
            tokens = self._sampler.admit(entry)
        except Exception as error:  # an invalid request must fail alone
            self._refused[entry.slot] = str(error)
            tokens = np.zeros(len(entry.tokens), dtype=np.int64)
        return tokens

    def _constrain(self, entry: Entry) -> None:
        if self._matchers is not None:
            self._matchers.admit(entry)
        elif entry.params.structured_outputs is not None:
            raise ValueError(f"{FAILED_PREFIX}this server has no grammar engine")

    def drafts_of(self, rows: tuple[Row, ...]) -> Ints:
        """The drafts of all rows, one after the other."""
        return drafted(rows, self._vocab_size)

    def columns_of(self, plan_rows: tuple[Row, ...]) -> Columns:
        """The columns of all rows; also starts the grammars' walks along drafts."""
        columns = columns_of(plan_rows, self._vocab_size, self._slots.arrays)
        if columns.lines.verifies and self._matchers is not None:
            self._matchers.walk({row.slot: row.drafts for row in plan_rows if row.drafts})
        return columns

    def drawing(self, lines: Lines) -> Drawing | None:
        """The sampling parameters of ``lines``; None if they need scores, or more than `Drawing` supports."""
        scored = self._scored and (self._top[lines.slots] >= 0).any()
        if scored or (self._matchers is not None and self._matchers.follow(lines.slots)):
            return None
        return self._sampler.drawing(lines.slots, lines.positions)

    def spans(self, rows: Rows) -> Ints:
        """Number of positions of each row that need scores of the prompt's next token; empty if none does."""
        if not self._scored:
            return NONE
        ends = self._prompt_end[rows.slot]
        return np.maximum(np.minimum(rows.end, ends) - rows.start, 0) if ends.any() else ends[:0]

    def failures(self, rows: tuple[Row, ...]) -> dict[int, str]:
        """Why some rows fail, by their index: their requests are invalid."""
        if not self._refused:
            return {}
        return {row: self._refused[each.slot] for row, each in enumerate(rows) if each.slot in self._refused}

    def greedy(self, batch: Batch, kv: PagedKV, lines: Lines) -> tuple[Arrived, Sampled] | None:
        """Compute a step in one call that also gives the likeliest token of each line; store them as `sample` does.

        None: there is no such call, or some line needs another token or scores; then nothing was done.
        """
        if self._apart or not self._takes_likeliest(lines):
            return None
        began = time.perf_counter()
        tokens = self._head.greedy(batch, kv)
        if tokens is None:
            return None
        computed = time.perf_counter()
        self._append(lines.slots, lines.positions, tokens)
        counting = lines.counting(torch.from_numpy(tokens), self._head.accept) if lines.verifies else None
        self._seconds["forward"] += computed - began
        self._seconds["sample"] += time.perf_counter() - computed
        if counting is None:
            return Arrived(tokens), Sampled(lines.rows.tolist(), 0, None, set(), [], ())
        return Arrived(tokens, counting), Sampled(lines.rows.tolist(), 0, 1, set(), [], ())

    def _takes_likeliest(self, lines: Lines) -> bool:
        """Whether `sample` would take the likeliest token of each line, of all lines at once and without scores."""
        if not 0 < len(lines.rows) <= self._most_logits:
            return False
        if self._matchers is not None and self._matchers.follow(lines.slots):
            return False
        if self._scored and (self._top[lines.slots] >= 0).any():
            return False
        return self._sampler.takes_likeliest(lines.slots, lines.positions)

    def sample(
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
            of_lines = hidden if whole else hidden[part]
            top = self._top[some.slots] if self._scored else NONE
            at = np.flatnonzero(top >= 0)
            if own is None and not at.size and self._sampler.takes_likeliest(some.slots, some.positions):
                tokens.append(self._as_forward(self._head.likeliest_after, of_lines))
                continue
            logits = self._as_forward(self._head.logits, of_lines)
            drawn = self._draw(logits, some, own, None if drafts is None else drafts[part], failures)
            tokens.append(drawn)
            if at.size:
                (at_,) = upload(self._slots.device, at)
                chosen = drawn.index_select(0, at_).clamp_(min=0)
                scores.append(score(logits.index_select(0, at_).float(), chosen, top[at], download))
                scored += (begin + at).tolist()
            del logits
        drawn = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        counting = lines.counting(drawn, self._head.accept) if lines.verifies else None
        self._append(lines.slots, lines.positions, drawn)
        self._sampler.append(lines.slots, drawn, counting)
        if self._matchers is not None:
            self._matchers.note(lines.slots, drawn, counting)
        constrained = set() if allowed is None else set(lines.rows[allowed.lines].tolist())
        counted = None if counting is None else download.add(counting)
        return Sampled(lines.rows.tolist(), download.add(drawn), counted, constrained, scored, tuple(scores))

    def _as_forward(
        self, compute: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        """``compute(hidden)``, timed as part of the forward pass."""
        began = time.perf_counter()
        computed = compute(hidden)
        self._seconds["forward"] += time.perf_counter() - began
        return computed

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
            each = logits if allowed is None else self._head.restrict(logits, allowed)
            return self._sample_alone(each, lines, drafts, failures)

    def _allowed(self, lines: Lines, failures: dict[int, str]) -> Allowed | None:
        """The tokens that grammars allow; rows whose grammar has failed are added to ``failures``."""
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

        An error in a line behind a draft is ignored: it is raised again when the line is the row's first.
        """
        drawn = torch.zeros(len(lines.rows), dtype=torch.int64, device=self._slots.device)
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

    def score_prompts(
        self, hidden: torch.Tensor, rows: Rows, spans: Ints, download: Download
    ) -> tuple[Scores, ...]:
        """Scores of the token after each state, in parts, because all logits of a long prompt would not fit at once."""
        slots = np.repeat(rows.slot, spans)
        following = np.repeat(rows.start, spans) + ramps(spans) + 1
        scores = []
        for begin in range(0, len(hidden), self._most_logits):
            part = slice(begin, begin + self._most_logits)
            tokens = self._slots.tokens_at(slots[part], following[part])
            logits = self._head.logits(hidden[part]).float()
            scores.append(score(logits, tokens, self._prompt_top[slots[part]], download))
        return tuple(scores)
