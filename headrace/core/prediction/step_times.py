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

from collections.abc import Iterable, Sequence
from operator import mul
from statistics import median

from headrace.core.prediction.draft_stairs import DraftStairs
from headrace.core.prediction.step_cost import TOKENS_ONLY, StepCost
from headrace.core.prediction.step_curve import StepCurve
from headrace.core.prediction.step_residuals import StepResiduals

MEMORY = 500
"""Steps after which an older one has lost 63 % of its weight."""

BATCH = 32
"""Steps per update of the fit, which keeps the work per step to a few operations."""

ANCHOR = 1.0
"""Weight of the ratios of `StepCost`, in steps: they decide what steps that are all alike cannot show."""

SWEEPS = 4
"""Rounds of coordinate descent per batch; the next batch goes on from there."""

OUTLIER = 3.0
"""Multiple of the mean error at which a step counts half; an error a hundred times as large hardly counts."""

FARTHEST = 1000.0
"""Upper bound on a step's duration relative to its prediction, because the prediction may have been zero."""

ENOUGH_STEPS = 8
"""Steps after which decisions use the predicted times."""

HOPE = 0.5
"""Cost of further tokens in a row, as a share of the line's slope, before such steps have been observed."""

CONTEXT_MEMORY = 32
"""Steps over which the mean context of rows is averaged."""

STAIRS = 16
"""Tables of steps with drafts that are kept, by the number of rows."""

LEAST_SPREAD = 0.01
"""The smallest relative error assumed, however exact the predictions have been."""


class StepTimes:
    """The seconds of a step by its rows, tokens and contexts, refitted while running.

    Weighted least squares of the relative error with non-negative coefficients, in which old steps fade. A step that
    took far longer than predicted (for example, its machine was busy) hardly counts, unless that becomes the rule:
    when most of a batch is off, all coefficients are scaled to the new pace. Before the first step the ratios of
    ``cost`` hold, at ``token_seconds`` per token. Afterwards they still decide what the observed steps leave open.
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
        """What the line leaves of steps, by their number of tokens."""
        fixed, _, token, context = self._coefficients
        self.curve = StepCurve((fixed, token, context))
        """What steps took, by their number of tokens: the chunks of prompts are divided by it."""
        self._stairs: dict[int, DraftStairs] = {}  # by rows
        self._context = 0.0  # the mean context of rows of one token

    @property
    def ready(self) -> bool:
        """Whether enough steps have been observed to decide by the predictions."""
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

    def decodes(self, rows: int, contexts: int) -> float:
        """The seconds of a step of ``rows`` rows of one token, with what the line leaves of such steps."""
        return self.predict(rows, rows, contexts) * self.residuals.plain(rows)

    def drafted(self, rows: int, tokens: int, contexts: int) -> float:
        """The seconds of a step some of whose rows have several tokens; not monotone where steps are new.

        Where no such step is known, further tokens are hoped to cost `HOPE` of the line's slope: they are tried, and
        then known.
        """
        base = self.decodes(rows, contexts * rows // tokens)
        _, _, token, context = self._coefficients
        slope = HOPE * (token + context * contexts / tokens)
        hoped = base + slope * (tokens - rows)
        known = self.residuals.longer(rows, tokens)
        if known is None:
            return hoped
        seconds = base * known.ratio + slope * max(0.0, tokens - known.tokens)
        blended = hoped + (seconds - hoped) * known.trust
        return min(hoped, blended) if known.larger else blended

    def reach(self, rows: int) -> int:
        """The most drafted positions of a step of ``rows`` rows whose duration is not far beyond what is known."""
        return self.residuals.reach(rows)

    def stairs(self, rows: int, contexts: int, most: int) -> Sequence[float]:
        """The seconds of a step of ``rows`` rows by the number of drafted positions, 0 to ``most`` or more.

        More positions never take less.
        """
        found, plain = self._stairs.get(rows), self.decodes(rows, contexts)
        if found is None or not found.holds(plain, self._seen, self.residuals.news):
            if len(self._stairs) >= STAIRS:
                self._stairs.clear()
            found = self._stairs[rows] = DraftStairs(
                rows, contexts, plain, self.drafted, seen=self._seen, news=self.residuals.news
            )
        return found.upto(most)

    def exclude(self, seconds: float) -> None:
        """These seconds of the step that is observed next were not spent on its rows."""
        self._excluded += seconds

    def observe(self, rows: int, tokens: int, contexts: int, seconds: float, drafted: bool = False) -> None:
        """Observe the duration of a step; a step without a duration or computed token is ignored.

        A ``drafted`` step is compared with the line and does not move it: the line says what the step would take
        without drafts, and must stay right where all steps have some. A step of one-token rows directly after one with
        drafts is not counted at all: its rows were asked for drafts, and the processor's caches hold what drafting left
        there, so it takes up to twice as long as a step of an engine that does not draft.
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
                self.predict(rows, rows, contexts) if plain else self.decodes(rows, contexts * rows // tokens)
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
            max(self.predict(rows, tokens, contexts), took / FARTHEST)
            for _, rows, tokens, contexts, took in self._recent
        ]
        pace = median(took / said for took, said in zip(seconds, predicted, strict=True))
        if not self._steps or (len(seconds) == BATCH and abs(pace - 1) > OUTLIER * self.spread):
            self._coefficients = [pace * value for value in self._coefficients]
            self._products = [pace * value for value in self._products]
            predicted = [pace * said for said in predicted]
        weights = self._weights(seconds, predicted)
        kept = (1 - 1 / MEMORY) ** len(seconds)
        self._steps = self._steps * kept + len(seconds)
        for i, term in enumerate(terms):
            weighted = list(map(mul, term, weights))
            self._products[i] = self._products[i] * kept + sum(map(mul, weighted, seconds))
            for j in range(i + 1):
                total = self._squares[i][j] * kept + sum(map(mul, weighted, terms[j]))
                self._squares[i][j] = self._squares[j][i] = total
        before = self.residuals.of_line(self._line)
        self._fit()
        self.residuals.line_moved(self._line, before)
        fixed, row, token, context = self._coefficients
        self.curve.line_moved((fixed, row + token, context))

    def _line(self, rows: float) -> float:
        """The seconds of a step of ``rows`` rows of one token, of the usual context."""
        fixed, row, token, context = self._coefficients
        return fixed + rows * (row + token + context * self._context)

    def _weights(self, seconds: Iterable[float], predicted: Iterable[float]) -> list[float]:
        """The weight of each step: errors are relative, and an unusually large one counts little."""
        weights = []
        for took, said in zip(seconds, predicted, strict=True):
            error = abs(took / said - 1)
            usual = OUTLIER * self.spread
            weights.append(1 / (said * said * (1 + (error / usual) ** 2)))
            self.spread = max(LEAST_SPREAD, self.spread + (min(error, usual) - self.spread) / BATCH)
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
