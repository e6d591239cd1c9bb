"""Interfaces for tensor and pipeline parallelism: collective operations within a step, and commands of rank 0's
runner to the other ranks.

`headrace.fleet` implements them with torch.distributed. A model calls the operations at the same points on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.compute.batch import Ints
from headrace.core.plan import StepPlan


class Parallel(Protocol):
    """Collective operations. Tensors are on the rank's device; every rank calls them in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks of a stage, which all get; ``x`` may be overwritten."""
        ...

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """The residual [tokens, hidden] of the stage before, for every stage but the first."""
        ...

    def send(self, residual: Tensor) -> None:
        """Send the residual to the next stage, for every stage but the last."""
        ...

    def hidden(self, states: Tensor, wanted: int) -> Tensor:
        """On rank 0: the states [wanted, hidden] of the last stage, whose own are ``states``.

        In a pipeline they arrive later: see `Followers.arrive`.
        """
        ...

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """On rank 0: logits [S, vocab] of ``hidden``, of which each rank with a head computes those of its tokens.

        ``project`` computes this rank's.
        """
        ...


class OneProcess:
    """The operations for a model in one process: no communication."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("there is one stage")

    def send(self, residual: Tensor) -> None:
        raise NotImplementedError("there is one stage")

    def hidden(self, states: Tensor, wanted: int) -> Tensor:
        return states

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        return project(hidden)


ONE_PROCESS = OneProcess()


class Followers(Protocol):
    """The other ranks of a parallel model: they apply all changes of slots and pages, and compute their part of the
    rows.
    """

    def restore(self) -> bool:
        """Restart the ranks if they were lost in a plan that has been collected; returns whether they were."""
        ...

    def execute(self, plan: StepPlan, tokens: Sequence[Ints], wanted: Ints) -> None:
        """Start a plan: entries, whose slots get ``tokens``, moves, and rows.

        ``wanted`` are the packed positions whose states are needed.
        """
        ...

    def append(self, slots: Ints, positions: Ints, tokens: Tensor) -> None:
        """See `Slots.append`."""
        ...

    def arrive(self) -> None:
        """Wait for the states of the oldest plan with rows."""
        ...

    def end(self) -> None:
        """The oldest plan with rows has ended."""
        ...
