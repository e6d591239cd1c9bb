"""Inputs of each layer beside its states (Gemma 3n and 4): their values, and their definition by kernel calls.

A token has an input for each layer: its row of a table, and a product of its embedding. Behind the MLP of a layer, a
gate that reads the states multiplies the layer's input, and a projection of that is added to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headrace.compute.batch import Batch
    from headrace.compute.kernels import Activation, Kernels


class PerLayerInputs(NamedTuple):
    """The inputs of L layers, each ``width`` wide.

    ``table`` [vocab, L * width] has the rows of tokens; it may be in bfloat16 for float32. ``projection`` [L * width,
    hidden], a `stack.Linear`, multiplies the embedding, ``norm`` float32 [width] normalizes each layer's part of that.
    Where rows of images stand, the rows of the table are those of the token ``padding``.
    """

    table: Tensor
    projection: Any
    norm: Tensor
    padding: int = 0

    def tokens(self, batch: Batch) -> Tensor:
        """The tokens int32 [T] of a batch by which rows of the table are taken."""
        if batch.features is None:
            return batch.tokens
        return batch.tokens.index_fill(0, batch.features.places, self.padding)

    @property
    def width(self) -> int:
        """Features of a layer's input."""
        return len(self.norm)


class InputGate(NamedTuple):
    """What adds its input to the states of a layer: ``gate`` [width, hidden] and ``projection`` [hidden, width], both
    `stack.Linear`, and the ``norm`` float32 [hidden] of what the projection returns.
    """

    gate: Any
    projection: Any
    norm: Tensor


def inputs_of(kernels: Kernels, of: PerLayerInputs, tokens: Tensor, embedded: Tensor, eps: float) -> Tensor:
    """The inputs [T, L * width] of tokens, whose embeddings are ``embedded`` [T, hidden]."""
    projected = kernels.linear(embedded, of.projection.weight, of.projection.bias)
    projected = (projected * embedded.shape[1] ** -0.5).view(-1, of.width)
    projected = kernels.rms_norm(projected, of.norm, eps).view(len(tokens), -1)
    rows = of.table.index_select(0, tokens).to(embedded.dtype)
    scale = torch.tensor(of.width**0.5, dtype=rows.dtype).item()
    return projected.add_(rows.mul_(scale)).mul_(2.0**-0.5)


def gated(
    kernels: Kernels, of: InputGate, states: Tensor, inputs: Tensor, activation: Activation, eps: float
) -> Tensor:
    """What is added to ``states`` [T, hidden] for a layer's ``inputs`` [T, width]."""
    gates = kernels.linear(states, of.gate.weight, of.gate.bias)
    inner = kernels.gated_activation(torch.cat((gates, inputs), 1), activation)
    out = kernels.linear(inner, of.projection.weight, of.projection.bias)
    return kernels.rms_norm(out, of.norm, eps)
