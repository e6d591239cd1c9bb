"""A transformers model as a decoder: packed rows in, hidden states and logits of the wanted positions out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.compute.adopted.attention import Attended, Layer, Mixing, heard_by, same_memory
from headrace.compute.adopted.states import SequenceStates
from headrace.compute.batch import Batch, StepInterrupted
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import Kernels, Pages
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.shape import ModelShape


def takes_positions(body: nn.Module) -> bool:
    """Whether the positions of a body's tokens can be given."""
    return _is_given_positions(body) or bool(_tables_of_positions(body))


def first_position(model: Any, longest: int) -> int:
    """The position of a sequence's first token: RoBERTa's table begins behind the position of its padding.

    ``longest`` is the number of positions in its config. The check at start compares the logits.
    """
    words = model.get_input_embeddings()
    for module in model.modules():
        plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
        if plain and module is not words and module.num_embeddings == longest:
            return 0 if module.padding_idx is None else int(module.padding_idx) + 1
    return 0


def _is_given_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


def _tables_of_positions(body: nn.Module) -> list[nn.Module]:
    """The modules of a body that embed positions [T], which they count themselves if they are given none."""
    return [each for each in body.modules() if isinstance(each, nn.Embedding) and _is_given_positions(each)]


def cut(model: Any, run: Callable[[], object], first: int = 0) -> AdoptedModel:
    """Cut a model behind its body: the first module that is called with the tokens of a pass and takes positions.

    If that is a whole language model inside, it is cut instead. ``first`` is the position of a first token.

    Raises:
        ModelError: the model calls no module with all its tokens and positions.
    """
    bodies: list[Any] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("input_ids", args[0] if args else None)
        whole = isinstance(given, Tensor) and not given.is_floating_point()
        if whole and not isinstance(module, nn.Embedding):
            bodies.append(module)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if bodies and bodies[0] is model:
        del bodies[0]
    while bodies and getattr(bodies[0], "lm_head", None) is not None:
        model = bodies.pop(0)
    body = next((each for each in bodies if _is_given_positions(each)), bodies[0] if bodies else None)
    if body is None or not takes_positions(body):
        raise ModelError("it has no body that takes tokens and their positions")
    return AdoptedModel(model, body, first)


class States:
    """The output of a model's body for its head: the last hidden states, and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class AdoptedModel:
    """A model of transformers, cut between its body and its head.

    The head is the model's own forward pass, with states in place of its body's output. So whatever the model does to
    states and logits is done here too.
    """

    def __init__(self, model: Any, body: Any, first: int) -> None:
        self.model = model
        self._first = first
        self._body = body.forward
        self._states: Tensor | None = None
        self._positions: Tensor | None = None
        self._given_positions = _is_given_positions(body)
        if not self._given_positions:
            for table in _tables_of_positions(body):
                table.forward = self._placed(table.forward)
        body.forward = self._given

    def _placed(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A table of positions that is given those of the step."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return plain(*args, **kwargs | {"position_ids": self._positions})

        return forward

    def _given(self, *_: Any, **__: Any) -> States:
        assert self._states is not None
        return States(self._states)

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The last hidden states [T, hidden] of one packed row of int64 tokens and positions [T]."""
        self._positions = positions + self._first if self._first else positions
        given = {"position_ids": self._positions[None]} if self._given_positions else {}
        found = self._body(
            input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None], use_cache=False, **given
        )
        states: Tensor = found.last_hidden_state[0]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Logits [S, vocab] of states [S, hidden]."""
        self._states = states[None]
        try:
            tokens = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
            found: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        finally:
            self._states = None
        return found


class PagedStep:
    """The attention of one step: writes keys and values of its rows to their pages, and attends to all before.

    Calls must come in the order of ``layers``.
    """

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[Layer],
        batch: Batch,
        pages: Sequence[Pages],
        states: SequenceStates | None,
    ) -> None:
        self.batch = batch
        self.kept: dict[object, Any] = {}  # what layers share in this step
        self._kernels = kernels
        self._layers = layers
        self._pages = pages
        self._plans: dict[int | None, Any] = {}
        self._next = 0
        self._written: dict[int, Attended] = {}  # calls with keys and values of their own, by their layers
        self._states = states
        if states is not None:
            states.begin(batch)
        # A rotation of two features by nothing: transformers has rotated already.
        still = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]], device=batch.tokens.device)
        self._rotation = still.expand(len(batch.tokens), 2, 2).contiguous()

    def attend(self, call: Attended) -> Tensor:
        """The next layer."""
        layer, pages = self.take(call.module)
        shape, window, shares = layer.shape[:3]
        plan = self._plan(window, call.queries.dtype)
        if shares is None:
            self._written[self._next - 1] = call
            parts = [_widened(part, shape.head_dim) for part in (call.queries, call.keys, call.values)]
            packed, slots = torch.cat(parts, 1).flatten(1), self.batch.slot_mapping
            queries = self._kernels.rope_write_kv(packed, shape, self._rotation, None, 1e-6, slots, pages)
        elif same_memory(self._written[shares], call):
            queries = _widened(call.queries, shape.head_dim)
        else:
            raise RuntimeError(
                "a layer has other keys and values than at start, when it had those of another"
            )
        sinks = None if call.sinks is None else call.sinks.float()
        out = self._kernels.paged_attention(queries, pages, plan, call.scale, call.softcap, sinks)
        return out.view(-1, shape.heads, shape.head_dim)[..., : layer.value_dim]

    def take(self, module: torch.nn.Module) -> tuple[Layer, Pages]:
        """The next layer and its pages, which must be that of ``module``."""
        if self.batch.interrupt is not None and self.batch.interrupt.is_set():
            raise StepInterrupted
        if self._next == len(self._layers) or self._layers[self._next].module is not module:
            raise RuntimeError("layers call attention in another order than at start")
        layer, pages = self._layers[self._next], self._pages[self._next]
        self._next += 1
        return layer, pages

    def mix(self, call: Mixing) -> Tensor:
        """The output of a mixer for all rows."""
        if self._states is None:
            raise RuntimeError("a mixer without states")
        return self._states.mix(call)

    def end(self) -> None:
        """Raise RuntimeError if layers are missing."""
        if self._next != len(self._layers):
            raise RuntimeError(f"{self._next} of {len(self._layers)} layers called attention")
        if self._states is not None:
            self._states.end()

    def _plan(self, window: int | None, dtype: torch.dtype) -> Any:
        if window not in self._plans:
            self._plans[window] = self._kernels.plan_attention(self.batch, window, dtype)
        return self._plans[window]


def _widened(part: Tensor, width: int) -> Tensor:
    """Heads [T, H, D] with zeros behind their features."""
    return part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1]))


class AdoptedDecoder(ModelDecoder):
    """A transformers model that is ready to run on one device.

    Args:
        model: with modules that the kernels compute where they can.
        shape: its sizes, with the recorded ``layers``.
        layers: its calls of attention, in their order.
        kernels: the backend.
        states: the recurrent states of its mixers; None: it has none.
    """

    def __init__(
        self,
        model: AdoptedModel,
        shape: ModelShape,
        layers: Sequence[Layer],
        kernels: Kernels,
        states: SequenceStates | None,
    ) -> None:
        super().__init__(kernels)
        self.shape = shape
        self._model = model
        self._layers = layers
        self.states = self._kept = states
        parameter = next(model.model.parameters())
        self.device, self.dtype = parameter.device, model.model.dtype

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Write the batch's keys and values to ``kv``; the last states [S, hidden] of the wanted positions."""
        step = PagedStep(self.kernels, self._layers, batch, kv.layers, self._kept)
        with heard_by(step):
            states = self._model.states(batch.tokens.long(), batch.positions)
        step.end()
        return states[batch.logits_indices]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab] of hidden states [S, hidden]."""
        return self._model.logits(hidden)
