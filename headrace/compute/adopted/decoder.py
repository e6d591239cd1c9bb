"""A transformers model as a decoder: packed rows in, hidden states and logits of the wanted positions out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.compute.adopted.attention import Layer, PagedStep, heard_by
from headrace.compute.adopted.states import SequenceStates
from headrace.compute.batch import Batch
from headrace.compute.kernels import Kernels
from headrace.compute.kv import PagedKV
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.shape import ModelShape
from headrace.compute.model.spec import ModelError


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
                table.forward = self._placed(table.forward)  # type: ignore[method-assign]
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
        self._states = states
        parameter = next(model.model.parameters())
        self.device, self.dtype = parameter.device, model.model.dtype

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Write the batch's keys and values to ``kv``; the last states [S, hidden] of the wanted positions."""
        step = PagedStep(self.kernels, self._layers, batch, kv.layers, self._states)
        with heard_by(step):
            states = self._model.states(batch.tokens.long(), batch.positions)
        step.end()
        return states[batch.logits_indices]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab] of hidden states [S, hidden]."""
        return self._model.logits(hidden)
