"""The results of a step on their way from the device, and the `StepOutput` that they become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from headrace.compute.batch import Ints
from headrace.compute.sampling.logprobs import Scores
from headrace.compute.sampling.sampler import FAULTS
from headrace.core.constraint import FAILED_PREFIX
from headrace.core.plan import StepOutput, TokenLogprob


class Arriving(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[Any]:
        """Block until all have arrived; returns them in order, as tensors or arrays of the host."""
        ...


class Arrived:
    """Arrays that are on the host already."""

    __slots__ = ("_arrays",)

    def __init__(self, *arrays: Ints | torch.Tensor) -> None:
        self._arrays = list(arrays)

    def wait(self) -> list[Ints | torch.Tensor]:
        """The arrays."""
        return self._arrays


class Sampled(NamedTuple):
    """A sampled step: the row of each line, indices in the download of tokens and (with drafts) of which tokens count,
    the rows with a grammar, and the lines with scores."""

    rows: list[int]
    tokens: int
    counting: int | None
    constrained: set[int]
    scored: list[int]
    scores: tuple[Scores, ...]


class Launched(NamedTuple):
    """A step whose work is queued; ``download`` has or receives its results."""

    step: int
    row_count: int
    failures: dict[int, str]
    download: Arriving
    sampled: Sampled | None = None
    prompt_spans: tuple[tuple[int, int], ...] = ()
    prompt_scores: tuple[Scores, ...] = ()
    waits: bool = False
    broken_off: bool = False


class HostStep:
    """The result of a plan on this thread: like a `Future`, but without locks, for speed.

    In a pipeline, ``end`` waits for the last stage, and ``slots`` receive its tokens.
    """

    __slots__ = ("_error", "_launched", "end", "slots")

    def __init__(self) -> None:
        self.end: Callable[[], Launched] | None = None
        self.slots = frozenset[int]()

    def run(self, work: Callable[[], Launched | Callable[[], Launched]]) -> None:
        """Do the work of the step, or the first part of it."""
        self._error: Exception | None = None
        try:
            done = work()
        except Exception as error:
            self._error = error
        else:
            if isinstance(done, Launched):
                self._launched = done
            else:
                self.end = done

    def result(self) -> Launched:
        """The launched step; raises what its work raised."""
        if self._error is not None:
            raise self._error
        return self._launched


def output_of(launched: Launched) -> StepOutput:
    """Convert the downloaded results to values."""
    if launched.broken_off:
        return StepOutput(launched.step, (), broken_off=True)
    host = launched.download.wait()
    tokens: list[tuple[int, ...]] = [()] * launched.row_count
    failures = dict(launched.failures)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    sampled = launched.sampled
    if sampled is not None:
        drawn = host[sampled.tokens].tolist()
        counting = [True] * len(drawn) if sampled.counting is None else host[sampled.counting].tolist()
        for row, token, counts in zip(sampled.rows, drawn, counting, strict=True):
            if not counts:
                continue
            if token < 0:
                blamed = FAILED_PREFIX if row in sampled.constrained else ""
                failures.setdefault(row, blamed + FAULTS[token])
            elif row not in failures:
                tokens[row] += (token,)
        scores = [value for part in sampled.scores for value in part.read(host)]
        for line, value in zip(sampled.scored, scores, strict=True):
            if counting[line] and tokens[row := sampled.rows[line]]:
                logprobs[row] = (*logprobs.get(row, ()), value)
    if launched.prompt_scores:
        scores = [value for part in launched.prompt_scores for value in part.read(host)]
        done = 0
        for row, span in launched.prompt_spans:
            if row not in failures:
                prompt_logprobs[row] = tuple(scores[done : done + span])
            done += span
    return StepOutput(launched.step, tuple(tokens), logprobs, prompt_logprobs, failures)
