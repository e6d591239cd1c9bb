"""LoRA adapters: the launches of `adapters`, two for each linear layer that some adapter of a step changes.

Tokens of a step are sorted by adapter on the host. Which experts a token has, only the device knows: its pairs of token
and expert are sorted there by adapter and expert, once for each layer with experts that an adapter changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.compute.batch import Batch
from headrace.compute.kernels.adapters import LINEARS, OF_EXPERTS, Change, LayerChanges, Part, StepChanges
from headrace.compute.kernels.triton import adapters as device
from headrace.compute.kernels.triton import experts as grouped
from headrace.compute.kernels.triton.target import Target, power
from headrace.compute.transfer import Array, upload

_LINE, _ALIGNED, _RANK = device.LINE.value, device.ALIGNED.value, device.RANK.value
MOST_PARTS = (_LINE - 2) // 5
"""Parts of a linear layer's outputs: queries, keys and values."""
_ROWS, _COLUMNS = 16, 64
"""Rows of a tile, and columns of a program."""
SORTED_AT_ONCE = 1024
"""Pairs that a program of sorting reads at once."""


class Most(NamedTuple):
    """The most ``ranks`` of a linear layer, ``columns`` of a part and ``parts``."""

    ranks: int = 0
    columns: int = 0
    parts: int = 0


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """An adapter on the device: its tensors, and as ``lines`` int64 [layers, linears, N] where they are.

    ``of_experts`` int64 [layers, 2, experts, N] on the device are those of experts (None: it changes none of them), and
    ``changed`` [layers] says of which layers. ``most`` are the sizes by the names of linears, with those of experts
    by `_routed`.
    """

    layers: LayerChanges
    lines: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    of_experts: Tensor | None
    changed: tuple[bool, ...]
    most: dict[str, Most]


def _routed(name: str) -> str:
    """The name of a linear layer of any expert, among `DeviceAdapter.most`."""
    return f"{name} of an expert"


def prepared(given: LayerChanges, place: torch.device) -> DeviceAdapter:
    """An adapter whose tensors are on the device ``place`` already."""
    layers = [{name: _even(change) for name, change in layer.items()} for layer in given]
    lines = np.zeros((len(layers), len(LINEARS), _LINE), dtype=np.int64)
    named = [name.split(" ") for layer in layers for name in layer if name not in LINEARS]
    experts = 1 + max((int(number) for _, number in named), default=-1)
    routed = np.zeros((len(layers), len(OF_EXPERTS), experts, _LINE), dtype=np.int64)
    most = dict[str, Most]()
    for layer, changes in enumerate(layers):
        for name, change in changes.items():
            line = _line(change)
            if name in LINEARS:
                lines[layer, LINEARS.index(name), : len(line)] = line
            else:
                name, _, number = name.partition(" ")
                routed[layer, OF_EXPERTS.index(name), int(number), : len(line)] = line
                name = _routed(name)
            columns, ranks = max(len(up) for _, up in change.parts), len(change.down)
            most[name] = Most(*map(max, most.get(name, Most()), (ranks, columns, len(change.parts))))
    changed = tuple(bool(each.any()) for each in routed)
    on_device = torch.from_numpy(routed).to(place) if experts else None
    return DeviceAdapter(layers, lines, on_device, changed, most)


def _line(change: Change) -> list[int]:
    line, begin = [change.down.data_ptr(), len(change.down)], 0
    for offset, up in change.parts:
        line += (up.data_ptr(), offset, len(up), begin, up.shape[1])
        begin += up.shape[1]
    return line


def _even(change: Change) -> Change:
    """The same change as the kernels read it: a row of zeros in ``down`` is a rank that adds nothing."""
    missing = [-part.up.shape[1] % _RANK for part in change.parts]
    if not any(missing):
        return Change(_aligned(change.down), tuple(Part(at, _aligned(up)) for at, up in change.parts))
    downs = change.down.split([part.up.shape[1] for part in change.parts])
    pairs = zip(downs, change.parts, missing, strict=True)
    wide = [
        (functional.pad(down, (0, 0, 0, more)), Part(part.offset, functional.pad(part.up, (0, more))))
        for down, part, more in pairs
    ]
    return Change(torch.cat([down for down, _ in wide]), tuple(part for _, part in wide))


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNED else tensor


class Tiles(NamedTuple):
    """Rows sorted by line, and ``number`` tiles of one line each: see `device.shrink`. ``rows`` is the most of them."""

    order: Tensor
    tiles: Tensor
    number: int
    rows: int


class DeviceChanges(StepChanges):
    """The adapters of a step; see `adapters.StepChanges`."""

    def __init__(self, batch: Batch, target: Target) -> None:
        self._target = target
        self._adapters: list[DeviceAdapter] = [each.adapter for each in batch.adapters]
        self._tokens = [np.asarray(each.tokens) for each in batch.adapters]
        self._device, self._positions = batch.tokens.device, len(batch.tokens)
        lines = np.stack([each.lines for each in self._adapters], 2)  # [layers, linears, adapters, N]
        (table,) = upload(self._device, lines.reshape(-1))
        self._table = table.view(lines.shape)
        self._changed: list[list[int]] = lines[..., 0].max(-1).tolist()
        self._of_experts = _joined([each.of_experts for each in self._adapters])
        self._tile()

    def of(self, layer: int) -> ChangesOfLayer:
        """See `StepChanges.of`."""
        return ChangesOfLayer(self, layer)

    def _changes_experts(self, layer: int) -> bool:
        return any(each.changed[layer] for each in self._adapters)

    def _tile(self) -> None:
        """Tiles of at most `_ROWS` tokens of one adapter, by their places among the tokens of all adapters."""
        counts = [len(tokens) for tokens in self._tokens]
        ends = np.cumsum(counts)
        tiles = [
            (adapter, begin, end)
            for adapter, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True))
            for begin in range(end - count, end, _ROWS)
        ]
        arrays: list[Array] = [np.concatenate(self._tokens), np.array(tiles, dtype=np.int64).reshape(-1)]
        if self._of_experts is not None:  # the device sorts their tokens
            owners = np.full(self._positions, -1, dtype=np.int32)
            for number, own in enumerate(self._tokens):
                owners[own] = number
            arrays.append(owners)
        order, of, *self._owners = upload(self._device, *arrays)
        self._held = Tiles(order, of, len(tiles), int(ends[-1]))

    @property
    def _groups(self) -> list[tuple[LayerChanges, Tensor]]:  # type: ignore[override]
        """Those of the definition."""
        tokens = [torch.from_numpy(each).to(self._device) for each in self._tokens]
        return [(each.layers, own) for each, own in zip(self._adapters, tokens, strict=True)]

    def keep(self, wanted: Tensor) -> None:
        """From now on, states are those of the positions ``wanted`` (ascending) alone."""
        kept = wanted.cpu().numpy()
        self._positions = len(kept)
        self._tokens = [np.flatnonzero(np.isin(kept, tokens)) for tokens in self._tokens]
        self._tile()

    def add(self, layer: int, name: str, x: Tensor, out: Tensor, of: Tensor | None = None) -> Tensor:
        """See `StepChanges.add`; with ``of``, by the definition."""
        if of is not None:
            return super().add(layer, name, x, out, of)
        if name in LINEARS:
            number = LINEARS.index(name)
            if not self._changed[layer][number]:
                return out
            return self._add(name, x, out, self._table[layer, number], _LINE, self._held)
        kind, _, expert = name.partition(" ")
        if self._of_experts is None or not self._changes_experts(layer):
            return out
        lines = self._of_experts[layer, OF_EXPERTS.index(kind)]
        if int(expert) >= lines.shape[1]:
            return out
        return self._add(_routed(kind), x, out, lines[0, int(expert)], lines.stride(0), self._held)

    def sorted(self, layer: int, ids: Tensor, experts: int) -> Tiles | None:
        """The pairs of ``ids`` int64 [T, K] with one of the first ``experts``, by adapter and expert; None: no adapter
        changes experts of the layer.
        """
        if self._of_experts is None or not self._changes_experts(layer):
            return None
        columns, pairs, known = ids.shape[1], ids.numel(), self._of_experts.shape[3]
        groups, rows = known * len(self._adapters), self._held.rows * columns
        order = torch.empty(max(rows, 1), dtype=torch.int32, device=self._device)
        begins, counts = order.new_empty((2, groups))
        grouped.sort_pairs[(groups,)](
            *(ids, *self._owners, order, begins, counts, pairs, min(known, experts), known),
            EACH=columns,
            OWNED=True,
            BLOCK=SORTED_AT_ONCE,
            num_warps=4,
        )
        some = min(groups, rows)  # so many tiles may not be full
        count = some + (rows - some) // _ROWS
        tiles = torch.empty(3 * count, dtype=torch.int64, device=self._device)
        if count:
            grouped.list_tiles[(1, count)](
                begins, counts, tiles, groups, GROUPS=power(groups, 2), ROWS=_ROWS, num_warps=4
            )
        return Tiles(order, tiles, count, rows)

    def add_sorted(self, layer: int, name: str, x: Tensor, out: Tensor, tiles: Tiles, each: int) -> Tensor:
        """`add` for the pairs of all experts of a layer: ``out`` has a row for each, and ``x`` one for ``each`` of
        them.
        """
        assert self._of_experts is not None, "some adapter changes experts"
        table = self._of_experts[layer, OF_EXPERTS.index(name)]
        return self._add(_routed(name), x, out, table, _LINE, tiles, each)

    def _add(
        self, name: str, x: Tensor, out: Tensor, table: Tensor, apart: int, of: Tiles, each: int = 1
    ) -> Tensor:
        """Add what the lines of a ``table``, which are ``apart`` numbers from each other, change for their tiles."""
        most = Most(*map(max, zip(*(one.most.get(name, Most()) for one in self._adapters), strict=True)))
        if not of.number or not most.ranks:
            return out
        x = x.contiguous()
        inner, keys = x.new_empty((of.rows, most.ranks)), min(128, power(x.shape[1]))
        some, dot = min(64, power(most.ranks)), self._target.dot(x.dtype)
        device.shrink[(of.number, -(-most.ranks // some))](
            *(x, of.order, of.tiles, table, inner, x.shape[1], most.ranks, apart),
            EACH=each,
            ROWS=_ROWS,
            RANKS=some,
            KEYS=keys,
            EVEN=x.shape[1] % keys == 0,
            DOT=dot,
            num_warps=4,
        )
        device.expand[(of.number, -(-most.columns // _COLUMNS), most.parts)](
            *(inner, of.order, of.tiles, table, out, out.shape[1], most.ranks, apart),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANKS=some,
            DOT=dot,
            num_warps=4,
        )
        return out


def _joined(lines: list[Tensor | None]) -> Tensor | None:
    """The lines of experts of all adapters [layers, 2, adapters, experts, N]; None if no adapter changes experts."""
    known = [each for each in lines if each is not None]
    if not known:
        return None
    experts, none = max(each.shape[2] for each in known), known[0].new_zeros((*known[0].shape[:2], 0, _LINE))
    every = [none if each is None else each for each in lines]
    return torch.stack([functional.pad(each, (0, 0, 0, experts - each.shape[2])) for each in every], 2)


@dataclass(frozen=True, slots=True)
class ChangesOfLayer:
    """`DeviceChanges` of one layer."""

    changes: DeviceChanges
    layer: int

    def __call__(self, name: str, x: Tensor, out: Tensor, of: Tensor | None = None) -> Tensor:
        """See `StepChanges.add`."""
        return self.changes.add(self.layer, name, x, out, of)

    def sorted(self, ids: Tensor, experts: int) -> Tiles | None:
        """See `DeviceChanges.sorted`."""
        return self.changes.sorted(self.layer, ids, experts)

    def add_sorted(self, name: str, x: Tensor, out: Tensor, tiles: Tiles, each: int) -> Tensor:
        """See `DeviceChanges.add_sorted`."""
        return self.changes.add_sorted(self.layer, name, x, out, tiles, each)
