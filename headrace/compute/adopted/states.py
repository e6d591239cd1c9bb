"""Recurrent states of transformers' models: of each sequence by its slot, beside the pages.

Mixers with a state (Mamba-2, gated delta nets, short convolutions) take a batch of rows of one length, and a cache that
holds the batch's states. Here the rows of a step that have the same length are such a batch: all decode rows are
one call. States are gathered from `StateTensors` before it and written back behind it, in their own dtype.

A state belongs to the end of what its sequence has computed. So a row must begin where its slot's last row ended, or at
position 0, or where a checkpoint that was moved to its slot ends. A step that may be interrupted writes its states back
only when all layers have been computed. The last positions of a row may be ahead of its state: they are a second call
of the mixer, behind which nothing is written.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.compute.adopted.attention import Mixing, listener
from headrace.compute.batch import Batch
from headrace.compute.states import LOST, UNKNOWN, StateShape, StateTensors, row_bytes

CHECK_SLOTS = 4
"""Slots of the check at start, before the memory is sized."""


class _Group(NamedTuple):
    """Rows of one length: the places int64 [R, L] of their tokens, their slots int64 [R], and whether they begin. The
    states stand behind the first ``kept`` tokens of each.
    """

    places: Tensor
    slots: Tensor
    kept: int
    fresh: bool


class SequenceStates:
    """The states of all slots for the mixers of one model.

    With ``token_by_token`` a row of several tokens that continues a sequence is so many calls: some mixers (Mamba-1)
    read their state only for a single token.
    """

    token_by_token = False

    def __init__(self, config: Any, copy_row: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=config)
        self._empty = copy.deepcopy(self._cache.layers)
        self._used: dict[nn.Module, Any] = {}
        self._shapes: dict[Hashable, StateShape] = {}
        self._copy_row = copy_row
        self.tensors = StateTensors({}, CHECK_SLOTS, 0, torch.device("cpu"))
        self._running: dict[int, int] = {}
        self._groups: list[_Group] = []
        # What a step that may be interrupted will write at its end; None: each layer writes at once.
        self._written: list[tuple[Hashable, Tensor, Tensor]] | None = None

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the states of one sequence, known after the first step."""
        return row_bytes(self._shapes)

    def allocate(self, slots: int, cells: int, device: torch.device) -> StateTensors:
        """Allocate the states of slots and checkpoints, whose shapes the check at start has found."""
        self.tensors = StateTensors(self._shapes, slots, cells, device, self._copy_row)
        return self.tensors

    def begin(self, batch: Batch) -> None:
        """Take the rows of a step.

        Raises:
            RuntimeError: a row does not continue where its slot's state ends.
        """
        if batch.slots is None:
            raise RuntimeError("a model with recurrent states needs the slots of its rows")
        slots, ends = [int(slot) for slot in batch.slots], self.tensors.ends
        ahead = [0] * len(slots) if batch.ahead is None else batch.ahead.tolist()
        found: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
        self._running = {}
        at = 0
        for slot, length, end, behind in zip(slots, batch.lengths, batch.contexts, ahead, strict=True):
            start = end - length
            if start and ends[slot] not in (start, LOST):
                raise RuntimeError(f"slot {slot} has computed {ends[slot]} tokens, a row starts at {start}")
            found.setdefault((length, length - behind, start == 0), []).append((at, slot))
            self._running[slot] = LOST if start and ends[slot] == LOST else end - behind
            at += length
        self._written = None if batch.interrupt is None else []
        if self._written is None:
            for slot in slots:
                ends[slot] = UNKNOWN
        device = batch.tokens.device
        self._groups = [
            _Group(
                (torch.tensor([begin for begin, _ in rows])[:, None] + torch.arange(length)).to(device),
                torch.tensor([slot for _, slot in rows], device=device),
                kept,
                fresh,
            )
            for (length, kept, fresh), rows in found.items()
        ]

    def end(self) -> None:
        """The step is complete: its rows may be continued."""
        for key, slots, state in self._written or ():
            self.tensors.views[key][slots] = state
        self._written = None
        for slot, end in self._running.items():
            self.tensors.ends[slot] = end

    def mix(self, call: Mixing) -> Tensor:
        """The mixer's output [1, T, hidden] for all rows of the step."""
        hidden: Tensor = call.arguments.arguments["hidden_states"]
        index: int = call.module.layer_idx
        out = torch.empty_like(hidden)
        for group in self._groups:
            layer = self._cache.layers[index] = self._layer(call.module, group)
            for places in self._pieces(group.places[:, : group.kept], fresh=group.fresh):
                out[0][places] = call.run(hidden[0][places], self._cache).to(out.dtype)
            self._keep(call.module, layer, group.slots)
            for places in self._pieces(group.places[:, group.kept :], fresh=False):
                out[0][places] = call.run(hidden[0][places], self._cache).to(out.dtype)
        return out

    def _pieces(self, places: Tensor, *, fresh: bool) -> tuple[Tensor, ...]:
        """The parts of a group's places that are one call each; none if there are no places."""
        if not places.shape[1]:
            return ()
        return torch.split(places, 1 if self.token_by_token and not fresh else places.shape[1], 1)

    def _layer(self, module: Any, group: _Group) -> Any:
        """The layer of the cache for a group, with its states unless it begins."""
        index = module.layer_idx
        if group.fresh:
            return copy.deepcopy(self._empty[index])
        layer = copy.copy(self._used[module])
        for kind in ("conv_states", "recurrent_states"):
            states = {
                number: None if state is None else self.tensors.views[index, kind, number][group.slots]
                for number, state in getattr(layer, kind).items()
            }
            setattr(layer, kind, states)
        return layer

    def _keep(self, module: Any, layer: Any, slots: Tensor) -> None:
        """Write the states of a group back, now or at the end. A layer may have several mixers with a state each."""
        self._used.setdefault(module, layer)
        for kind in ("conv_states", "recurrent_states"):
            for number, state in getattr(layer, kind).items():
                if state is None:
                    continue
                key = module.layer_idx, kind, number
                if key not in self._shapes:
                    self._learn(key, state)
                if self._written is not None:
                    self._written.append((key, slots, state.clone()))  # a call behind it may change it
                else:
                    self.tensors.views[key][slots] = state

    def _learn(self, key: Hashable, state: Tensor) -> None:
        """The first step meets a state: remember its shape, and make room for the check at start."""
        shape = self._shapes[key] = StateShape(tuple(state.shape[1:]), state.dtype)
        alone = StateTensors({key: shape}, CHECK_SLOTS, 0, state.device)
        self.tensors.views |= alone.views


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that keep a recurrent state in a cache which they are given."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and {"cache", "hidden_states"} <= inspect.signature(module.forward).parameters.keys()
        and any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


def redirect(mixers: list[nn.Module]) -> None:
    """Let mixers ask the listener of the running pass; without one they compute as they are."""
    for module in mixers:
        module.forward = _redirected(module, module.forward)


def _redirected(module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    def forward(*args: Any, **kwargs: Any) -> Any:
        heard = listener()
        if heard is None:
            return plain(*args, **kwargs)
        return heard.mix(Mixing(module, plain, signature.bind(*args, **kwargs)))

    return forward
