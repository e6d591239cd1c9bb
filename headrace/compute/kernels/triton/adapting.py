"""LoRA adapters: the launches of `adapters`, two for each linear layer that some adapter of a step changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels.adapters import LINEARS, Change, LayerChanges, Part, StepChanges
from headrace.compute.kernels.triton import adapters as device
from headrace.compute.kernels.triton.target import Target, power
from headrace.compute.transfer import upload

_LINE = device.LINE.value
MOST_PARTS = (_LINE - 2) // 5
"""Parts of a linear layer's outputs: queries, keys and values."""
_ROWS, _COLUMNS = 16, 64
"""Tokens of a tile, and columns of a program."""


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """An adapter on the device: its tensors, and as ``lines`` int64 [layers, linears, N] where they are.

    ``ranks`` and ``columns`` are the most that a linear layer and a part have, by the names of linears.
    """

    layers: LayerChanges
    lines: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ranks: dict[str, int]
    columns: dict[str, int]


def prepared(given: LayerChanges) -> DeviceAdapter:
    """An adapter whose tensors are on the device already."""
    layers = [
        {
            name: Change(
                change.down.contiguous(), tuple(Part(at, up.contiguous()) for at, up in change.parts)
            )
            for name, change in layer.items()
        }
        for layer in given
    ]
    lines = np.zeros((len(layers), len(LINEARS), _LINE), dtype=np.int64)
    ranks, columns = dict[str, int](), dict[str, int]()
    for layer, changes in enumerate(layers):
        for name, (down, parts) in changes.items():
            line, begin = [down.data_ptr(), len(down)], 0
            for offset, up in parts:
                line += (up.data_ptr(), offset, len(up), begin, up.shape[1])
                begin += up.shape[1]
                columns[name] = max(columns.get(name, 0), len(up))
            lines[layer, LINEARS.index(name), : len(line)] = line
            ranks[name] = max(ranks.get(name, 0), len(down))
    return DeviceAdapter(layers, lines, ranks, columns)


class DeviceChanges(StepChanges):
    """The adapters of a step; see `adapters.StepChanges`."""

    def __init__(self, batch: Batch, target: Target) -> None:
        self._target = target
        self._adapters: list[DeviceAdapter] = [each.adapter for each in batch.adapters]
        self._tokens = [np.asarray(each.tokens) for each in batch.adapters]
        self._device = batch.tokens.device
        lines = np.stack([each.lines for each in self._adapters], 2)  # [layers, linears, adapters, N]
        (table,) = upload(self._device, lines.reshape(-1))
        self._table = table.view(lines.shape)
        self._changed: list[list[int]] = lines[..., 0].max(-1).tolist()
        self._tile()

    @property
    def any(self) -> bool:
        """Whether rows of the step have an adapter."""
        return bool(self._adapters)

    def _tile(self) -> None:
        """Tiles of at most `_ROWS` tokens of one adapter, by their places among the tokens of all adapters."""
        counts = [len(tokens) for tokens in self._tokens]
        ends = np.cumsum(counts)
        tiles = [
            (adapter, begin, end)
            for adapter, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True))
            for begin in range(end - count, end, _ROWS)
        ]
        self._tiles = len(tiles)
        if tiles:
            self._total = int(ends[-1])
            self._held = upload(
                self._device, np.concatenate(self._tokens), np.array(tiles, dtype=np.int64).reshape(-1)
            )

    def keep(self, wanted: Tensor) -> None:
        """From now on, states are those of the positions ``wanted`` (ascending) alone."""
        kept = wanted.cpu().numpy()
        self._tokens = [np.flatnonzero(np.isin(kept, tokens)) for tokens in self._tokens]
        self._tile()

    def add(self, layer: int, name: str, x: Tensor, out: Tensor, of: Tensor | None = None) -> Tensor:
        """See `StepChanges.add`; ``of`` is None, since no adapter here changes experts."""
        number = LINEARS.index(name)
        if not self._tiles or not self._changed[layer][number]:
            return out
        x, table, (tokens, tiles) = x.contiguous(), self._table[layer, number], self._held
        ranks = max(each.ranks.get(name, 0) for each in self._adapters)
        columns = max(each.columns.get(name, 0) for each in self._adapters)
        inner, keys = x.new_empty((self._total, ranks)), min(128, power(x.shape[1]))
        some, dot = min(64, power(ranks)), self._target.dot(x.dtype)
        device.shrink[(self._tiles, -(-ranks // some))](
            *(x, tokens, tiles, table, inner, x.shape[1], ranks),
            ROWS=_ROWS,
            RANKS=some,
            KEYS=keys,
            EVEN=x.shape[1] % keys == 0,
            DOT=dot,
            num_warps=4,
        )
        device.expand[(self._tiles, -(-columns // _COLUMNS), MOST_PARTS)](
            *(inner, tokens, tiles, table, out, out.shape[1], ranks),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANKS=some,
            DOT=dot,
            num_warps=4,
        )
        return out
