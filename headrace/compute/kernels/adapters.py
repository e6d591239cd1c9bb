"""LoRA adapters as values, and the definition of what they add to linear layers (arXiv:2106.09685).

```
 x of some tokens [t, in]  ── down.T ──►  [t, R]  ──┬─ up.T ──►  + columns [offset, offset + out) of their outputs
                                                    └─ up.T ──►  + …                 (queries, keys, values; gate, up)
```
The rows of a step may have different adapters, or none. Each adapter's tokens are gathered, and its product is added
to the outputs of the linear layer, whatever that layer's weights are stored as.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headrace.compute.batch import Batch

LINEARS = ("qkv", "output", "gate_up", "down")
"""The linear layers of a decoder's layer that an adapter may change, by their fields of `weights.LayerWeights`."""
OF_EXPERTS = ("gate_up", "down")
"""Those of each expert, in the order of `experts.Mlp`; their names are those of `of_expert`."""


def of_expert(name: str, expert: int) -> str:
    """The name of a linear layer of an expert; the shared one follows the others."""
    return f"{name} {expert}"


class Part(NamedTuple):
    """What is added to the outputs from ``offset`` on: ``up`` [out, rank], which includes the adapter's scale."""

    offset: int
    up: Tensor


class Change(NamedTuple):
    """The change of one linear layer; ``down`` [R, in] has the ranks of all ``parts`` one after the other."""

    down: Tensor
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)


LayerChanges = Sequence[Mapping[str, Change]]
"""The changes of each layer by the names in `LINEARS` or of `of_expert`; a linear layer without one stays as it is."""


_TOGETHER = 16
"""Elements of a tensor are a multiple of it where several are copied as one, so that each begins at whole words."""


def to_device(layers: LayerChanges, device: torch.device) -> LayerChanges:
    """The same changes on ``device``, by one copy for each layer: of an adapter of experts there are thousands."""
    return [_moved(layer, device) for layer in layers]


def _moved(layer: Mapping[str, Change], device: torch.device) -> Mapping[str, Change]:
    tensors = [
        each for change in layer.values() for each in (change.down, *(part.up for part in change.parts))
    ]
    if all(each.device == device for each in tensors):
        return layer
    flat = [each.reshape(-1) for each in tensors]
    even = [
        functional.pad(each, (0, -len(each) % _TOGETHER)) if len(each) % _TOGETHER else each for each in flat
    ]
    copied = torch.split(torch.cat(even).to(device), [len(each) for each in even])
    moved = iter([part[: each.numel()].view(each.shape) for part, each in zip(copied, tensors, strict=True)])
    return {
        name: Change(next(moved), tuple(Part(at, next(moved)) for at, _ in change.parts))
        for name, change in layer.items()
    }


class StepChanges:
    """The adapters of a step, for a pass that calls the linear layers one by one."""

    def __init__(self, batch: Batch) -> None:
        device = batch.tokens.device
        self._groups: list[tuple[LayerChanges, Tensor]] = [
            (each.adapter, torch.from_numpy(each.tokens).to(device)) for each in batch.adapters
        ]

    def keep(self, wanted: Tensor) -> None:
        """From now on, states are those of the positions ``wanted`` (ascending) alone."""
        self._groups = [
            (layers, torch.isin(wanted, tokens).nonzero().flatten()) for layers, tokens in self._groups
        ]

    def of(self, layer: int) -> Callable[..., Tensor] | None:
        """`add` for a layer; None if no row of the step has an adapter."""
        return partial(self.add, layer) if self._groups else None

    def add(self, layer: int, name: str, x: Tensor, out: Tensor, of: Tensor | None = None) -> Tensor:
        """``out`` [T, out], the outputs of a linear layer for ``x`` [T, in], with the changes of the adapters added.

        ``of``: the tokens of the rows, where these are not all tokens.
        """
        for layers, tokens in self._groups:
            change = layers[layer].get(name)
            if change is not None and of is not None:
                tokens = torch.isin(of, tokens).nonzero().flatten()
            if change is None or not len(tokens):
                continue
            inner, begin = x.index_select(0, tokens) @ change.down.T, 0
            for offset, up in change.parts:
                rank = up.shape[1]
                added = inner[:, begin : begin + rank] @ up.T
                out[:, offset : offset + len(up)].index_add_(0, tokens, added)
                begin += rank
        return out


def check_changes(layers: LayerChanges, sizes: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    """Raise ValueError unless the changes fit linear layers of these ``sizes`` [outputs, inputs]."""
    if len(layers) != len(sizes):
        raise ValueError(f"an adapter of {len(layers)} layers for {len(sizes)}")
    for layer, known in zip(layers, sizes, strict=True):
        for name, (down, parts) in layer.items():
            outputs, inputs = known.get(name, (0, 0))
            ranks = sum(part.up.shape[1] for part in parts)
            fits = down.shape == (ranks, inputs) and all(
                part.offset >= 0 and part.offset + len(part.up) <= outputs for part in parts
            )
            if not fits:
                raise ValueError(f"the change of {name} does not fit a linear layer [{outputs}, {inputs}]")
