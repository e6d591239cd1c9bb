"""A stack: all layers of a decoder as one value, and its definition in terms of single kernel calls (`apply`).

Tests compare backends that run a stack in one call with `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.compute.batch import Batch, StepInterrupted
from headrace.compute.kernels import Activation, HeadNorm, HeadShape, Kernels, Pages, latent
from headrace.compute.kernels.experts import Feed, Mlp, activated
from headrace.compute.kernels.latent import Latent
from headrace.compute.kernels.mixers import NO_MULTIPLIERS, Multipliers
from headrace.compute.kernels.per_layer import InputGate, PerLayerInputs, gated, inputs_of
from headrace.compute.kernels.recurrent import RecurrentStates
from headrace.compute.parallel import ONE_PROCESS, Parallel


class Linear(NamedTuple):
    """A linear layer; ``weight`` as `Kernels.prepare_linear` made it."""

    weight: Any
    bias: Tensor | None


class Beside(NamedTuple):
    """The first and the last linear layer of a mixer beside attention."""

    first: Linear
    output: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is ready to run. Norm weights are float32 [hidden], ``qk_norm`` [H + G, D]; None: no such norm.

    ``window`` is the number of keys that a token attends to (None: all), ``rope`` the index of its rotation.
    ``following_norm`` is the next layer's first norm, or the decoder's last. ``sinks`` float32 [H] are those of
    `Kernels.paged_attention`. ``heads`` are its own, None: those of the stack. A layer that ``shares`` attends to the
    keys and values of an earlier one, and its ``qkv`` has only queries. ``input_gate`` adds its input to the states
    behind the MLP, and ``scale`` multiplies the states before the layer's last sum. With ``latent``, ``qkv`` is the
    first product of attention over latents. Without ``feed`` the next layer follows attention. Tokens of ``joint``
    rows of a batch attend to each other, if the layer is ``joint`` too.

    A ``mixer``, as `Kernels.prepare_mixer` made it, stands in the place of attention. It reads the outputs of ``qkv``
    and ``gates``, and the ``states`` of these keys; its outputs are the inputs of ``output``. Attention with ``gates``
    is multiplied with the sigmoid of their outputs. A mixer ``beside`` attention has its own linear layers.
    """

    qkv: Linear
    output: Linear
    feed: Feed | None
    qk_norm: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    post_mlp_norm: Tensor | None
    following_norm: Tensor | None
    window: int | None
    rope: int
    gates: Linear | None = None
    mixer: Any = None
    states: tuple[Hashable, ...] = ()
    beside: Beside | None = None
    sinks: Tensor | None = None
    heads: HeadShape | None = None
    shares: bool = False
    input_gate: InputGate | None = None
    scale: float = 1.0
    latent: Latent | None = None
    joint: bool = False

    @property
    def attends(self) -> bool:
        """Whether it has attention, and with it pages: no mixer stands in its place."""
        return self.mixer is None or self.beside is not None

    @property
    def plain(self) -> bool:
        """Whether it has attention over keys and values, without gates, and an MLP or experts."""
        other = (self.mixer, self.gates, self.latent)
        return all(each is None for each in other) and self.feed is not None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers that compute every token, in the order of computation."""
        mlp = self.feed if isinstance(self.feed, Mlp) else ()
        of_input = () if self.input_gate is None else self.input_gate[:2]
        query = (self.latent.query,) if self.latent and self.latent.query else ()
        gates = () if self.gates is None else (self.gates,)
        return self.qkv, *gates, *query, self.output, *(self.beside or ()), *mlp, *of_input


@dataclass(frozen=True, slots=True)
class Stack:
    """All layers (at least one), and what they have in common; ``input_norm`` is that of the first layer.

    ``embedding`` [vocab, hidden] has ``dtype``, like activations and biases, or is in bfloat16 for float32, which its
    rows become when they are looked up. They are multiplied by ``embedding_scale``. ``ropes`` are the rotations of all
    positions, float32 [P, 2, rotary], to which layers refer. ``axes`` int64 [rotary] say of each rope by which position
    of ``batch.axes`` a feature rotates; None: by the first.
    ``head_norm`` says what ``qk_norm`` of the layers normalizes.

    ``per_layer`` are the inputs of the layers that have a gate for them.

    In a model in parts ``parallel`` connects the ranks, and the embedding has the tokens from ``first_token`` on.
    ``first`` and ``last`` say whether the stage begins with tokens and ends with the states after the last norm.
    ``recurrent`` are the states of the layers with mixers. ``multipliers`` are those of layers whose mixer is beside
    attention.
    """

    embedding: Tensor
    embedding_scale: float
    ropes: tuple[Tensor, ...]
    layers: tuple[Layer, ...]
    input_norm: Tensor | None
    dtype: torch.dtype
    heads: HeadShape
    activation: Activation
    eps: float
    scale: float
    softcap: float | None
    head_norm: HeadNorm = "head"
    parallel: Parallel = ONE_PROCESS
    first_token: int = 0
    first: bool = True
    last: bool = True
    recurrent: RecurrentStates | None = None
    per_layer: PerLayerInputs | None = None
    multipliers: Multipliers = NO_MULTIPLIERS
    axes: tuple[Tensor | None, ...] = ()

    def heads_of(self, layer: Layer) -> HeadShape:
        """The heads of a layer's attention."""
        return layer.heads or self.heads

    def packed(self, layer: Layer) -> HeadShape:
        """The heads in a row of a layer's ``qkv``."""
        heads = self.heads_of(layer)
        return heads._replace(kv_heads=0) if layer.shares else heads

    @property
    def whole(self) -> bool:
        """Whether one process has the whole model."""
        return self.parallel is ONE_PROCESS


def apply(
    kernels: Kernels,
    stack: Stack,
    batch: Batch,
    pages: Sequence[Pages],
) -> Tensor:
    """See `Kernels.run_stack`. The result is meaningful only in the last pipeline stage."""
    attending = [layer for layer in stack.layers if layer.attends]
    kinds = {(layer.window, held.group, layer.joint) for layer, held in zip(attending, pages, strict=True)}
    plans = {kind: _plan(kernels, stack, batch, *kind) for kind in kinds}
    rotations = rotations_of(stack, batch)
    changes = kernels.step_changes(batch)
    if stack.first:
        residual = embedded(stack, batch)
    else:
        residual = stack.parallel.receive(len(batch.tokens), stack.embedding.shape[1], stack.dtype)
    inputs = layer_inputs(kernels, stack, batch, residual)
    x = residual if stack.input_norm is None else kernels.rms_norm(residual, stack.input_norm, stack.eps)
    paged = iter(pages)
    for number, layer in enumerate(stack.layers):
        copy_tapped(batch, number, residual)
        if batch.interrupt is not None and batch.interrupt.is_set():
            raise StepInterrupted
        qkv = changes.add(number, "qkv", x, kernels.linear(x, layer.qkv.weight, layer.qkv.bias))
        gates = None if layer.gates is None else kernels.linear(x, layer.gates.weight, layer.gates.bias)
        beside = _beside(kernels, stack, layer, x)
        if not layer.attends:
            x = _mixed(kernels, stack, layer, qkv, gates)
        else:
            held, rotation = next(paged), rotations[layer.rope]
            plan, rows = plans[layer.window, held.group, layer.joint], batch.of(held.group)
            x = _attended(kernels, stack, layer, qkv, rotation, rows, held, plan)
            x = x if gates is None else x.mul_(gates.sigmoid_())
        if stack.last and layer is stack.layers[-1] and len(batch.logits_indices) < len(batch.tokens):
            # No position attends to the last layer's output: only wanted positions continue.
            x, residual = x[batch.logits_indices], residual[batch.logits_indices]
            inputs = None if inputs is None else inputs[batch.logits_indices]
            beside = None if beside is None else beside[batch.logits_indices]
            changes.keep(batch.logits_indices)
        y = changes.add(number, "output", x, kernels.linear(x, layer.output.weight, layer.output.bias))
        x = stack.parallel.all_reduce(y if beside is None else _joined(kernels, stack, layer, y, beside))
        if layer.post_attention_norm is not None:
            x = kernels.rms_norm(x, layer.post_attention_norm, stack.eps)
        if layer.feed is not None:
            x, residual = kernels.add_rms_norm(x, residual, layer.mlp_norm, stack.eps)
            y = feed(kernels, layer.feed, x, stack, changes.of(number))
            x = stack.parallel.all_reduce(y)
        if layer.post_mlp_norm is not None:
            x = kernels.rms_norm(x, layer.post_mlp_norm, stack.eps)
        if layer.input_gate is not None and inputs is not None:
            x, residual = with_input(kernels, stack, layer.input_gate, x, residual, inputs[:, number])
        residual = with_deep(batch, number, residual if layer.scale == 1.0 else residual.mul_(layer.scale))
        x, residual = kernels.add_rms_norm(x, residual, layer.following_norm, stack.eps)
    copy_tapped(batch, len(stack.layers), residual)
    if not stack.last:
        stack.parallel.send(residual)
    return x


def _plan(kernels: Kernels, stack: Stack, batch: Batch, window: int | None, group: int, joint: bool) -> Any:
    """What attention of some layers needs of a batch."""
    rows = batch.of(group)
    rows = rows if joint or rows.joint is None else replace(rows, joint=None)
    return kernels.plan_attention(rows, window, stack.dtype)


def rotations_of(stack: Stack, batch: Batch) -> list[Tensor]:
    """The rotations float32 [T, 2, rotary] of a batch, by each rope."""
    if batch.axes is None:
        return [table.index_select(0, batch.positions) for table in stack.ropes]
    found = []
    for table, axes in zip(stack.ropes, stack.axes, strict=True):
        if axes is None:
            found.append(table.index_select(0, batch.axes[0]))
        else:
            at = batch.axes.index_select(0, axes).t()[:, None]
            found.append(table.gather(0, at.expand(-1, 2, -1)))
    return found


def with_deep(batch: Batch, layer: int, residual: Tensor) -> Tensor:
    """The states with the rows of images that belong behind ``layer``: see `batch.Features`."""
    features = batch.features
    if features is None or features.deep is None or layer >= len(features.deep):
        return residual
    return residual.index_add_(0, features.places, features.deep[layer])


def _mixed(kernels: Kernels, stack: Stack, layer: Layer, first: Tensor, second: Tensor | None) -> Tensor:
    """What the mixer of a layer returns for the outputs of its linear layers."""
    states = stack.recurrent
    assert states is not None, "a layer with a mixer has states"
    inputs = (first,) if second is None else (first, second)
    return kernels.mix(inputs, layer.mixer, states.rows, states.of(layer.states))


def _beside(kernels: Kernels, stack: Stack, layer: Layer, x: Tensor) -> Tensor | None:
    """What the mixer beside the attention of a layer returns for the layer's input, if there is one."""
    if layer.beside is None:
        return None
    first = layer.beside.first
    return _mixed(kernels, stack, layer, kernels.linear(x, first.weight, first.bias), None)


def _joined(kernels: Kernels, stack: Stack, layer: Layer, attended: Tensor, mixed: Tensor) -> Tensor:
    """The sum of what attention and the mixer beside it return, ``mixed`` before its last linear layer."""
    assert layer.beside is not None
    out = kernels.linear(mixed, layer.beside.output.weight, layer.beside.output.bias)
    return attended.mul_(stack.multipliers.attention).add_(out.mul_(stack.multipliers.mixer))


def _attended(
    kernels: Kernels,
    stack: Stack,
    layer: Layer,
    qkv: Tensor,
    rotation: Tensor,
    batch: Batch,
    held: Pages,
    plan: Any,
) -> Tensor:
    """What the attention of a layer returns for its first product, before its last one."""
    if layer.latent is not None:
        return latent.attend(kernels, layer.latent, qkv, rotation, batch, held, stack.scale)
    heads, of = stack.packed(layer), (layer.qk_norm, stack.eps, batch.slot_mapping, held, stack.head_norm)
    queries = kernels.rope_write_kv(qkv, heads, rotation, *of)
    return kernels.paged_attention(queries, held, plan, stack.scale, stack.softcap, layer.sinks)


def layer_inputs(kernels: Kernels, stack: Stack, batch: Batch, states: Tensor) -> Tensor | None:
    """The inputs [T, L, width] of all layers, if they have any; ``states`` are those before the first one."""
    if stack.per_layer is None:
        return None
    rows = inputs_of(kernels, stack.per_layer, stack.per_layer.tokens(batch), states, stack.eps)
    return rows.view(len(batch.tokens), -1, stack.per_layer.width)


def with_input(
    kernels: Kernels, stack: Stack, gate: InputGate, x: Tensor, residual: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """What is to be added for a layer's ``inputs`` [T, width] after ``x``, and the states with ``x``."""
    residual = kernels.add_rms_norm(x, residual, None, stack.eps)[1]
    return gated(kernels, gate, residual, inputs, stack.activation, stack.eps), residual


def feed(
    kernels: Kernels,
    of: Feed,
    x: Tensor,
    stack: Stack,
    add: Callable[..., Tensor] | None = None,
) -> Tensor:
    """What the MLP or the experts of a layer return for ``x`` [T, hidden]; ``add`` changes what its linears return:
    see `StepChanges.add`.
    """
    if not isinstance(of, Mlp):
        indices, weights = kernels.route(x, of.router)
        indices = indices if of.own is None else of.own.of(indices)
        return kernels.experts(x, indices, weights, of.each, stack.activation, add)
    (gate_up, down), gate, last = of, stack.multipliers.gate, stack.multipliers.mlp
    if add is None and gate == last == 1.0:
        return kernels.mlp(x, of, stack.activation)
    wide = kernels.linear(x, gate_up.weight, gate_up.bias)
    wide = wide if add is None else add("gate_up", x, wide)
    if gate != 1.0:
        wide[:, : wide.shape[1] // 2].mul_(gate)
    inner = activated(kernels, wide, stack.activation)
    out = kernels.linear(inner, down.weight, down.bias)
    out = out if add is None else add("down", inner, out)
    return out if last == 1.0 else out.mul_(last)


def embedded(stack: Stack, batch: Batch) -> Tensor:
    """The embeddings [T, hidden] of a batch, and the rows of images among them."""
    rows = _looked_up(stack, batch.tokens)
    if batch.features is not None:
        rows.index_copy_(0, batch.features.places, batch.features.rows)
    return rows


def _looked_up(stack: Stack, tokens: Tensor) -> Tensor:
    """The embeddings [T, hidden] of tokens; each rank looks up those in its part of the table."""
    if stack.whole:
        rows = stack.embedding.index_select(0, tokens).to(stack.dtype)
    else:
        places = tokens - stack.first_token
        absent = (places < 0) | (places >= len(stack.embedding))
        rows = stack.embedding.index_select(0, places.masked_fill(absent, 0)).to(stack.dtype)
        rows = stack.parallel.all_reduce(rows.masked_fill_(absent[:, None], 0))
    return rows if stack.embedding_scale == 1.0 else rows * stack.embedding_scale


def copy_tapped(batch: Batch, layer: int, residual: Tensor) -> None:
    """Copy the hidden states before ``layer`` to where the batch wants them: see `batch.Taps`."""
    if batch.taps is None:
        return
    states, layers = batch.taps
    for place, each in enumerate(layers.tolist()):
        if each == layer:
            width = residual.shape[1]
            states[:, place * width : (place + 1) * width].copy_(residual)
