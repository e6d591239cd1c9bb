"""Admission by memory: whether one more sequence fits now, and at the predicted peak of all running sequences.

```
 blocks |            ,-+
        |        ,-''  |  ,+          every sequence takes a block each block_size steps until it ends,
        |    ,-''      '-' |          and then gives all of its blocks back
        | ,-'              '--
        +----------------------> steps
          now          ^ the first end: the peak is just before one of the ends, so only those are checked
```
Counting only the blocks needed now admits too many sequences, which then preempt each other and are recomputed.
Counting the maximum that each could need leaves memory unused. The past-future scheduler (Gong et al., ASPLOS '25)
checks the predicted ends instead. A wrong prediction costs a preemption, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from headrace.core.capacity import NO_WINDOWS, WindowGroups, blocks_needed
from headrace.core.plan import new_tuple
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.sequence import Sequence


class RoomPolicy(Protocol):
    """Whether a candidate may start in addition to the running sequences.

    It would take ``fresh`` of the ``free`` blocks at once. With nothing running it must accept whenever ``fresh`` are
    free: no block would become free by waiting.
    """

    def fits(self, running: Many[Sequence], candidate: Sequence, fresh: int, free: int) -> bool: ...


class AlwaysFits:
    """Admits by the blocks needed now, plus one more block for each running sequence."""

    def fits(self, running: Many[Sequence], candidate: Sequence, fresh: int, free: int) -> bool:
        return fresh + len(running) <= free


class Growth(NamedTuple):
    """A sequence with ``tokens`` in blocks, predicted to end with ``final`` tokens (no fewer).

    ``shared`` of its blocks are also held by other sequences.
    """

    tokens: int
    final: int
    shared: int = 0


def peak_growth(growths: Many[Growth], block_size: int) -> int:
    """The largest number of blocks, beyond those held now, that all sequences will hold together.

    Each grows by one token per step.
    """
    # places[r]: the sequences whose last block has r free places
    places = [0] * block_size
    for tokens, _, _ in growths:
        places[-tokens % block_size] += 1
    alive, returned, peak = len(growths), 0, 0
    for tokens, final, shared in sorted(growths, key=_steps_left):
        left = final - tokens
        # Each takes as many blocks as `left` tokens need, except those whose free places hold the last part
        # of them.
        growth = blocks_needed(left, block_size)
        last_part = left - (growth - 1) * block_size
        peak = max(peak, alive * growth - sum(places[last_part:]) - returned)
        places[-tokens % block_size] -= 1
        alive -= 1
        returned += blocks_needed(tokens, block_size) - shared
    return peak


def _steps_left(growth: Growth) -> int:
    return growth.final - growth.tokens


QUANTILE = 0.7
"""The quantile of the output length that is predicted for each sequence. A sum of many quantiles is rarer than one, so
about the mean of a skewed distribution is careful enough for all together."""


class Headroom:
    """Admits while the predicted peak stays ``watermark`` blocks below the size of the pool.

    Args:
        lengths: predicts output lengths.
        block_size: tokens per block.
        watermark: blocks left free even at the peak, for sequences that exceed their prediction.
        windows: groups of window layers, whose blocks grow with those of a table up to the window.
    """

    def __init__(
        self,
        lengths: LengthPredictor,
        block_size: int,
        watermark: int,
        windows: WindowGroups = NO_WINDOWS,
    ) -> None:
        self._lengths = lengths
        self._block_size = block_size
        self._watermark = watermark
        self._windows = windows

    def fits(self, running: Many[Sequence], candidate: Sequence, fresh: int, free: int) -> bool:
        if not running:
            return fresh <= free
        available = free - self._watermark - fresh - self._due(running)
        if available < 0:
            return False
        size = self._block_size
        known, final = candidate.known, self._final(candidate)
        wanted = blocks_needed(final, size) - blocks_needed(known, size)
        for sequence in running:
            end = sequence.predicted_length
            if end <= len(sequence.tokens) + sequence.pending:
                end = self._final(sequence)
            wanted += -(-end // size) - len(sequence.table)
        share = 1.0 if not self._windows.groups else self._share(running, candidate, wanted)
        if share * wanted <= available:
            return True  # even if no sequence released a block
        # Cached blocks may be shared with other sequences, so they may not become free when this one ends.
        growths = [
            new_tuple(Growth, (len(s.tokens) + s.pending, s.predicted_length, s.cached_tokens // size))
            for s in running
        ]
        growths.append(Growth(known, final, blocks_needed(known, size) - fresh))
        owed = sum(blocks_needed(sequence.known, size) - len(sequence.table) for sequence in running)
        return share * (peak_growth(growths, size) + owed) <= available

    def _due(self, running: Many[Sequence]) -> int:
        """Blocks of window groups that the prompts of running sequences still need."""
        windows, size = self._windows, self._block_size
        if not windows.groups:
            return 0
        window, missing = blocks_needed(windows.tokens, size) + 1, 0
        for sequence in running:
            held = sequence.window_end - sequence.window_first
            missing += max(0, min(window, blocks_needed(sequence.known, size)) - held)
        return windows.groups * missing

    def _share(self, running: Many[Sequence], candidate: Sequence, wanted: int) -> float:
        """How many blocks all groups take for each of the ``wanted`` blocks of tables."""
        size, tokens = self._block_size, self._windows.tokens
        growing = 0
        for sequence in (candidate, *running):
            now, end = sequence.known, min(sequence.predicted_length, tokens)
            growing += max(0, blocks_needed(end, size) - blocks_needed(now, size))
        return 1.0 + self._windows.groups * growing / max(1, wanted)

    def _final(self, sequence: Sequence) -> int:
        """The predicted final length; it is predicted again only when the sequence has exceeded the last prediction."""
        known = sequence.known
        if sequence.predicted_length <= known:
            produced = known - sequence.prompt_tokens
            final = sequence.prompt_tokens + self._lengths.quantile(
                sequence.request, QUANTILE, given=produced
            )
            sequence.predicted_length = max(final, known)
        return sequence.predicted_length
