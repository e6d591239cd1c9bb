"""What the ranks of a model in parts exchange within a step: the interface, and its identity for one process.

`headrace.fleet` implements it over torch.distributed. A model calls it at the same points on every rank, so that all
of them take part in each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


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
        """On rank 0: the states [wanted, hidden] of the last stage, whose own are ``states``."""
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
