"""What the ranks of a model in parts exchange within a step: the interface, and its identity for one process. And what
the runner of rank 0 says to the other ranks.

`headrace.fleet` implements it over torch.distributed. A model calls it at the same points on every rank, so that all
of them take part in each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.compute.slots import Ints
from headrace.core.plan import StepPlan


class Parallel(Protocol):
    """The operations between ranks. Tensors are on the rank's device; every rank calls them in the same order."""

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
    """A model as a whole: nothing is exchanged."""

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
    """The other ranks of a model in parts: they do what changes slots and pages too, and compute their part of the
    rows.
    """

    def restore(self) -> bool:
        """Start the ranks again if they were lost in a plan that has been collected; whether they were."""
        ...

    def execute(self, plan: StepPlan, tokens: Sequence[Ints], wanted: Ints) -> None:
        """Begin a plan: its entries, whose slots get ``tokens``, its moves, and its rows.

        The states at the packed positions ``wanted`` are needed.
        """
        ...

    def append(self, slots: Ints, positions: Ints, tokens: Tensor) -> None:
        """See `Slots.append`."""
        ...

    def arrive(self) -> None:
        """Wait for the states of the oldest plan with rows."""
        ...

    def end(self) -> None:
        """The oldest plan with rows needs nothing more."""
        ...
