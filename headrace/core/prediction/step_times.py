"""The cost of a step: `StepCost` in tokens, known before the first one; `StepTimes` in seconds, fitted while running.

```
 StepCost     fixed + sum over rows of  length * (1 + mean context / context_tokens)
              reading weights, launching        linear layers      attention
 StepTimes    fixed + a * rows + b * tokens + c * contexts
```
The unit of `StepCost` is one token's pass through the linear layers. Its two numbers need not be exact: they bound
the *ratio* of a mixed step to a step that only decodes, at any context length. Everywhere, ``contexts`` is the sum
over all computed tokens of the number of positions each attends to.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import mul
from statistics import median
from typing import NamedTuple

from headrace.core.prediction.step_curve import TOKENS_ONLY, StepCost, StepCurve

# Corrections of the linear fit of step times: tables by the numbers of rows and tokens of a step.
#
#  seconds     .---------    kernels compute tokens in tiles, and rows of one token by another kernel:
#         .----'             real step times are a staircase, `StepTimes` is a line through it
#  -------'
#  tokens 1   8   16   32
# For steps whose rows all have one token, the table has the ratio to the line. For steps with drafts it has the ratio
# to a step of the same rows with one token each. The weight of old observations decays, so that sizes that once seemed
# slow are tried again.

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Upper bounds of the classes of rows or tokens; larger numbers belong to a last class."""

MAX_CHANGE = 1.0
"""Largest change of a logarithmic estimate by one observation (a factor of e), because a step may be interrupted."""

MIN_NEW_WEIGHT = 1 / 16
"""Minimum weight of a new observation."""

DECAY = 1 - 1 / 4000
"""Factor by which the weight of an observation decays at each step."""

ENOUGH_WEIGHT = 12.0
"""Total weight of observations that is enough to compare a step with drafts with one without."""

SOME_WEIGHT = 4.0
"""Total weight of a few observations."""

MAX_GROWTH = 2
"""A step with drafts may have at most this multiple of the tokens of the largest measured one."""

MIN_DRAFTED = 15  # see docs/decisions/speculative-decoding.md#growth-of-steps-with-drafts
"""Drafted positions that any step may have. The first step with drafts is several times slower than later ones, because
its code is not in the CPU caches. Steps limited to twice its few positions would never seem to pay."""


class VerifyRatio(NamedTuple):
    """Measured steps with drafts: their ``ratio`` to one-token rows, mean ``tokens``, and its ``confidence`` (0 to 1).

    ``larger``: they have more tokens than the requested step, which takes no longer than they do.
    """

    ratio: float
    tokens: float
    confidence: float
    larger: bool = False


class StepResiduals:
    """Ratios learned from observed steps."""

    def __init__(self) -> None:
        self._decode = [_Cell() for _ in range(len(EDGES) + 1)]
        self._verify: dict[int, list[_Cell]] = {}  # by class of rows, then of tokens
        self._steps = 0
        self.revision = 0
        """Increases with each observation of a class of steps with drafts that has few observations."""

    def observe(self, rows: int, tokens: int, ratio: float, expected: float = 1.0) -> None:
        """Observe a step's ``ratio`` to the line (rows of one token), or to a step of the same rows without drafts.

        The first estimate of a class starts at the ``expected`` ratio, because it changes by `MAX_CHANGE` at most.
        """
        self._steps += 1
        at = bisect_left(EDGES, tokens)
        if tokens == rows:
            cells = self._decode
        else:
            cells = self._verify.setdefault(bisect_left(EDGES, rows), [])
            if not cells:
                cells += [_Cell() for _ in range(len(EDGES) + 1)]
            self.revision += cells[at].weight < SOME_WEIGHT
        if not cells[at].weight and tokens > rows:
            cells[at].value = math.log(min(expected, ratio))
        cells[at].learn(math.log(ratio), tokens, self._steps)

    def decode_ratio(self, rows: int) -> float:
        """The ratio of a step of ``rows`` rows of one token to the line."""
        return math.exp(self._decode[bisect_left(EDGES, rows)].value)

    def is_measured(self, rows: int) -> bool:
        """Whether enough steps of this class of rows, with one token each, have been observed lately."""
        cell = self._decode[bisect_left(EDGES, rows)]
        return cell.weight * DECAY ** (self._steps - cell.seen) >= ENOUGH_WEIGHT

    def max_drafted(self, rows: int) -> int:
        """Maximum number of drafted positions of a step of ``rows`` rows: few more than have been measured."""
        cells = self._verify.get(bisect_left(EDGES, rows), ())
        known = max([rows, *(cell.tokens for cell in cells if cell.weight)])
        return max(MIN_DRAFTED, int(MAX_GROWTH * known) - rows)

    def line_changed(self, line: Callable[[float], float], before: Sequence[float]) -> None:
        """Adapt the ratios to a refitted line, so that the estimated seconds stay the same.

        ``before`` are the `line_seconds` of the old line.
        """
        for cell, was, now in zip(self._decode, before, self.line_seconds(line), strict=True):
            if was > 0 and now > 0:
                cell.value += math.log(was / now)

    def line_seconds(self, line: Callable[[float], float]) -> list[float]:
        """The seconds of the line for the observed steps of one-token rows, by class of rows; 0 without any."""
        return [line(cell.tokens) if cell.weight else 0.0 for cell in self._decode]

    def verify_ratio(self, rows: int, tokens: int) -> VerifyRatio | None:
        """The nearest measured class of steps with drafts: of as many rows and at most as many tokens, or else of more.

        None if no step with drafts of so many rows was observed.
        """
        cells = self._verify.get(bisect_left(EDGES, rows))
        if cells is None:
            return None
        middle = bisect_left(EDGES, tokens)
        for at in (*range(middle, -1, -1), *range(middle + 1, len(cells))):
            cell = cells[at]
            if cell.weight:
                weight = cell.weight * DECAY ** (self._steps - cell.seen)
                # More tokens do not take less time. A single observation of them is not enough to say so.
                known = [other.value for other in cells[at + 1 :] if other.weight >= SOME_WEIGHT]
                value = min([cell.value, *known])
                return VerifyRatio(math.exp(value), cell.tokens, weight / (weight + 0.25), at > middle)
        return None


class _Cell:
    __slots__ = ("seen", "tokens", "value", "weight")

    def __init__(self) -> None:
        self.value = 0.0
        self.tokens = 0.0
        self.weight = 0.0
        self.seen = 0

    def learn(self, value: float, tokens: int, step: int) -> None:
        self.weight = self.weight * DECAY ** (step - self.seen) + 1
        self.seen = step
        rate = max(MIN_NEW_WEIGHT, 1 / self.weight)
        change = value - self.value
        self.value += max(-MAX_CHANGE, min(MAX_CHANGE, change)) * rate
        self.tokens += (tokens - self.tokens) * rate


# The seconds of a step by the number of its drafted positions: a table that is built rarely and read at every step.
#
#  seconds          .-----     0 positions: the step without drafts
#             .-----'          more positions never take less time
#  ----------'
#  positions  0   7   15
# Within a class of `step_residuals`, `StepTimes.verify_seconds` is linear. So the table needs two values per class.

LIFETIME = 16
"""Number of observed steps after which a table is rebuilt."""

DRIFT = 1 / 32
"""Relative change of the seconds without drafts after which a table is rebuilt."""

VerifySeconds = Callable[[int, int, int], float]
"""The seconds of a step by its rows, tokens and contexts."""


class VerifyTimes:
    """The table of a step of ``rows`` rows of one token, whose contexts are ``contexts``.

    ``plain`` are the seconds without drafts, and ``verify_seconds`` computes those with drafts at the same mean
    context. ``seen`` counts the steps that `StepTimes` has observed, and ``revision`` is `StepResiduals.revision`.
    """

    def __init__(
        self,
        rows: int,
        contexts: int,
        plain: float,
        verify_seconds: VerifySeconds,
        *,
        seen: int,
        revision: int,
    ) -> None:
        self._rows = rows
        self._contexts = contexts
        self._verify_seconds = verify_seconds
        self._expires = seen + LIFETIME
        self._revision = revision
        self._seconds = [plain]

    def is_valid(self, plain: float, seen: int, revision: int) -> bool:
        """Whether the table is still valid if a step without drafts takes ``plain`` seconds now."""
        known = self._seconds[0]
        return seen < self._expires and revision == self._revision and abs(plain - known) <= DRIFT * known

    def up_to(self, count: int) -> list[float]:
        """Seconds by the number of drafted positions, for 0 to at least ``count`` of them."""
        seconds = self._seconds
        while len(seconds) <= count:
            first = self._rows + len(seconds)
            at = bisect_left(EDGES, first)
            last = EDGES[at] if at < len(EDGES) else 2 * first
            begin = max(seconds[-1], self._at(first))
            slope = max(0.0, self._at(last) - begin) / max(1, last - first)
            seconds += [begin + slope * more for more in range(last - first + 1)]
        return seconds

    def _at(self, tokens: int) -> float:
        return self._verify_seconds(self._rows, tokens, self._contexts * tokens // self._rows)


DECAY_STEPS = 500
"""Number of steps after which an older one has lost 63 % of its weight."""

BATCH = 32
"""Steps per update of the fit, so that the work per step is a few operations."""

ANCHOR = 1.0
"""Weight of the ratios of `StepCost`, in steps: they decide what the observed steps cannot, if all are alike."""

SWEEPS = 4
"""Rounds of coordinate descent per batch; the next batch continues from the result."""

OUTLIER = 3.0
"""Multiple of the mean error at which a step counts half; an error a hundred times as large hardly counts."""

MAX_RATIO = 1000.0
"""Upper bound of a step's duration relative to its prediction, because the prediction may be zero."""

ENOUGH_STEPS = 8
"""Number of steps after which decisions use the predicted times."""

UNSEEN_COST = 0.5
"""Assumed cost of drafted tokens before steps with drafts have been observed, as a share of the line's slope."""

CONTEXT_MEMORY = 32
"""Number of steps over which the mean context of rows is averaged."""

MAX_TABLES = 16
"""Maximum number of tables of steps with drafts, one per number of rows."""

MIN_SPREAD = 0.01
"""Minimum of the mean relative error, however exact the predictions were."""


class StepTimes:
    """The seconds of a step by its rows, tokens and contexts, refitted while running.

    Weighted least squares of the relative error with non-negative coefficients; the weight of old steps decays. A step
    that took far longer than predicted (for example, because the machine was busy) hardly counts. If most steps of a
    batch are off, all coefficients are scaled to the new speed. Before the first step the ratios of ``cost`` are used,
    at ``token_seconds`` per token. Afterwards they still decide what the observed steps leave open.
    """

    def __init__(self, cost: StepCost = TOKENS_ONLY, token_seconds: float = 1e-3) -> None:
        self._ratios = (cost.fixed_tokens, 0.0, 1.0, 1 / cost.context_tokens)
        self._coefficients = [ratio * token_seconds for ratio in self._ratios]
        self._squares = [[0.0] * 4 for _ in range(4)]  # weighted sums of products of the four terms
        self._products = [0.0] * 4  # weighted sums of each term times the seconds
        self._steps = 0.0  # weight of the steps seen
        self._seen = 0
        self._excluded = 0.0
        self._after_drafts = False  # whether the last step that was observed had drafts
        self._recent: list[tuple[int, int, int, int, float]] = []
        self.spread = 1.0
        """Recent mean relative error."""
        self.residuals = StepResiduals()
        """Corrections of the line, by number of tokens."""
        fixed, _, token, context = self._coefficients
        self.curve = StepCurve((fixed, token, context), cost.context_tokens)
        """Measured seconds of steps, by number of tokens: prompts are divided by it."""
        self._verify_times: dict[int, VerifyTimes] = {}  # by rows
        self._context = 0.0  # the mean context of rows of one token

    @property
    def ready(self) -> bool:
        """Whether enough steps have been observed for decisions to use the predictions."""
        return self._seen >= ENOUGH_STEPS

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds per step, row, token, and position attended to."""
        fixed, row, token, context = self._coefficients
        return fixed, row, token, context

    def predict(self, rows: int, tokens: int, contexts: int) -> float:
        """The seconds of a step with ``rows`` rows and ``tokens`` tokens, the sum of whose contexts is ``contexts``."""
        fixed, row, token, context = self._coefficients
        return fixed + row * rows + token * tokens + context * contexts

    def decode_seconds(self, rows: int, contexts: int) -> float:
        """The seconds of a step of ``rows`` rows of one token, with the learned correction."""
        return self.predict(rows, rows, contexts) * self.residuals.decode_ratio(rows)

    def verify_seconds(self, rows: int, tokens: int, contexts: int) -> float:
        """The seconds of a step some of whose rows have drafted tokens; not monotone where few steps were observed.

        Where no such step was observed, a drafted token is assumed to cost `UNSEEN_COST` of the line's slope, so that
        such steps are tried and measured.
        """
        base = self.decode_seconds(rows, contexts * rows // tokens)
        _, _, token, context = self._coefficients
        slope = UNSEEN_COST * (token + context * contexts / tokens)
        optimistic = base + slope * (tokens - rows)
        known = self.residuals.verify_ratio(rows, tokens)
        if known is None:
            return optimistic
        seconds = base * known.ratio + slope * max(0.0, tokens - known.tokens)
        blended = optimistic + (seconds - optimistic) * known.confidence
        return min(optimistic, blended) if known.larger else blended

    def max_drafted(self, rows: int) -> int:
        """Maximum number of drafted positions of a step of ``rows`` rows: few more than have been measured."""
        return self.residuals.max_drafted(rows)

    def verify_times(self, rows: int, contexts: int, count: int) -> Sequence[float]:
        """The seconds of a step of ``rows`` rows by the number of drafted positions, for 0 to at least ``count``.

        The seconds never fall with the number of positions.
        """
        found, plain = self._verify_times.get(rows), self.decode_seconds(rows, contexts)
        if found is None or not found.is_valid(plain, self._seen, self.residuals.revision):
            if len(self._verify_times) >= MAX_TABLES:
                self._verify_times.clear()
            found = self._verify_times[rows] = VerifyTimes(
                rows, contexts, plain, self.verify_seconds, seen=self._seen, revision=self.residuals.revision
            )
        return found.up_to(count)

    def exclude(self, seconds: float) -> None:
        """Exclude ``seconds`` from the duration of the next observed step, because its rows did not take them."""
        self._excluded += seconds

    def observe(self, rows: int, tokens: int, contexts: int, seconds: float, drafted: bool = False) -> None:
        """Observe the duration of a step; a step without a duration or computed token is ignored.

        A ``drafted`` step is compared with the line and does not move it: the line predicts the step without drafts,
        and must stay right even if all steps have some. A step of one-token rows directly after one with drafts is
        ignored. Its proposers were called and the CPU caches are cold after drafting, so it takes up to twice as long
        as a step of an engine that does not draft.
        """
        seconds -= self._excluded
        self._excluded = 0.0
        after_drafts, self._after_drafts = self._after_drafts, drafted
        if seconds <= 0 or tokens < 1 or (after_drafts and not drafted and tokens == rows and self.ready):
            return
        self._seen += 1
        if not drafted:
            self.curve.observe(tokens, contexts, seconds)
        if self.ready:
            plain = tokens == rows
            usual = (
                self.predict(rows, rows, contexts)
                if plain
                else self.decode_seconds(rows, contexts * rows // tokens)
            )
            if plain:
                self._context += (contexts / rows - self._context) / CONTEXT_MEMORY
            if usual > 0 and (plain or drafted):
                _, _, token, context = self._coefficients
                further = (token + context * contexts / tokens) * (tokens - rows)
                self.residuals.observe(rows, tokens, seconds / usual, 1 + further / usual)
        if not (drafted and self.ready):
            self._recent.append((1, rows, tokens, contexts, seconds))
            if len(self._recent) >= min(BATCH, 1 + self._steps / 4):
                self._learn()
                self._recent.clear()

    def _learn(self) -> None:
        *terms, seconds = zip(*self._recent, strict=True)
        predicted = [
            max(self.predict(rows, tokens, contexts), took / MAX_RATIO)
            for _, rows, tokens, contexts, took in self._recent
        ]
        pace = median(took / said for took, said in zip(seconds, predicted, strict=True))
        if not self._steps or (len(seconds) == BATCH and abs(pace - 1) > OUTLIER * self.spread):
            self._coefficients = [pace * value for value in self._coefficients]
            self._products = [pace * value for value in self._products]
            predicted = [pace * said for said in predicted]
        weights = self._weights(seconds, predicted)
        kept = (1 - 1 / DECAY_STEPS) ** len(seconds)
        self._steps = self._steps * kept + len(seconds)
        for i, term in enumerate(terms):
            weighted = list(map(mul, term, weights))
            self._products[i] = self._products[i] * kept + sum(map(mul, weighted, seconds))
            for j in range(i + 1):
                total = self._squares[i][j] * kept + sum(map(mul, weighted, terms[j]))
                self._squares[i][j] = self._squares[j][i] = total
        before = self.residuals.line_seconds(self._line)
        self._fit()
        self.residuals.line_changed(self._line, before)
        fixed, _, token, context = self._coefficients
        self.curve.line_changed((fixed, token, context))

    def _line(self, rows: float) -> float:
        """The line's seconds of a step of ``rows`` rows of one token, at the mean context."""
        fixed, row, token, context = self._coefficients
        return fixed + rows * (row + token + context * self._context)

    def _weights(self, seconds: Iterable[float], predicted: Iterable[float]) -> list[float]:
        """The weight of each step: errors are relative, and an unusually large one counts little."""
        weights = []
        for took, said in zip(seconds, predicted, strict=True):
            error = abs(took / said - 1)
            usual = OUTLIER * self.spread
            weights.append(1 / (said * said * (1 + (error / usual) ** 2)))
            self.spread = max(MIN_SPREAD, self.spread + (min(error, usual) - self.spread) / BATCH)
        return weights

    def _fit(self) -> None:
        """Least squares under ``coefficient >= 0`` by coordinate descent, each coefficient anchored to its ratio."""
        squares, products, values = self._squares, self._products, self._coefficients
        scale = _dot(self._ratios, products) / sum(
            ratio * _dot(self._ratios, line) for ratio, line in zip(self._ratios, squares, strict=True)
        )
        pull = ANCHOR / self._steps
        for _ in range(SWEEPS):
            for i, line in enumerate(squares):
                own = line[i]
                if own > 0:
                    others = _dot(line, values) - own * values[i]
                    anchored = pull * own * self._ratios[i] * scale
                    values[i] = max(0.0, (products[i] - others + anchored) / (own * (1 + pull)))


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    total: float = sum(map(mul, left, right))
    return total
