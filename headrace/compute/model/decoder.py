"""The decoder that all model families share: packed rows in, logits of the wanted positions out.

The kernels run the layers; `kernels.stack` defines a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.device import return_freed_memory
from headrace.compute.kernels import Counts, Drafted, HeadShape, Kernels
from headrace.compute.kernels.adapters import OF_EXPERTS, LayerChanges, check_changes, of_expert, to_device
from headrace.compute.kernels.experts import Feed, Mixture, Mlp, OwnExperts, Router
from headrace.compute.kernels.latent import Latent
from headrace.compute.kernels.mixers import Mixer
from headrace.compute.kernels.native_experts import NativeExperts
from headrace.compute.kernels.packed import PackedWeight
from headrace.compute.kernels.per_layer import InputGate, PerLayerInputs
from headrace.compute.kernels.recurrent import RecurrentStates
from headrace.compute.kernels.stack import Beside, Layer, Linear, Stack
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.layout import expert_places, linear_places
from headrace.compute.model.rope import feature_axes, rope_table
from headrace.compute.model.shape import ModelShape
from headrace.compute.model.sharding import Shard, shard_of
from headrace.compute.model.spec import DecoderSpec, LayerSpec
from headrace.compute.model.weights import DecoderWeights, LayerWeights
from headrace.compute.parallel import ONE_PROCESS, Parallel
from headrace.compute.sampling.choice import TokenChoice
from headrace.compute.sampling.penalties import Allowed, Penalty
from headrace.compute.states import KeptStates

LATENT_EPS = 1e-6
"""The epsilon of the norms of latents and of narrow queries, whatever the config says of the others."""

_RETURNED_EXPERTS = 16
"""After so many prepared experts, the memory that they leave is returned to the system."""

_DESCRIBED = frozenset({"shape", "device", "dtype", "nbytes", "kernels"})
"""Attributes of a decoder without weights."""


class ModelDecoder(ABC):
    """A loaded model on one device, as steps, sampling and drafting use it.

    ``shape`` is that of this rank's part, ``nbytes`` the bytes of its weights, and ``head`` the head as the kernels
    prepared it, which a head for drafts may share (None: it cannot). ``graphed``: its steps may be recorded as graphs.
    ``states`` are its recurrent states, if it has any.
    """

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    nbytes: int
    head: Any = None
    graphed = False
    states: KeptStates | None = None

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def drop_weights(self) -> None:
        """Free the weights, until `take_weights`; only the attributes that `ModelDecoder` describes stay."""
        described = {name: value for name, value in vars(self).items() if name in _DESCRIBED}
        vars(self).clear()
        vars(self).update(described)

    def take_weights(self, other: ModelDecoder) -> None:
        """Become ``other``, the same model that was loaded again and that nothing else uses."""
        vars(self).update(vars(other))

    @abstractmethod
    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Write the batch's keys and values to ``kv``; the last states [S, hidden] of the wanted positions, after the
        final norm.
        """

    def greedy(self, batch: Batch, kv: PagedKV) -> Counts | None:
        """`likeliest_after` the states of `hidden`, on the host; None: not in one call, and nothing was done."""
        return None

    def use(self, kernels: Kernels) -> None:
        """Compute with ``kernels`` that take what the present ones have prepared, such as `measure.TimedKernels`."""
        self.kernels = kernels

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab] of hidden states [S, hidden]."""

    def draft(self, batch: Batch, kv: PagedKV, most: Counts, least: float) -> Drafted | None:
        """See `Kernels.draft`; None: not in one call."""
        return None

    def expert_loads(self) -> list[list[int]]:
        """The tokens that each expert of each layer has computed, without shared experts; empty if the kernels do not
        count them.
        """
        return []

    def likeliest(self, logits: Tensor) -> Tensor:
        """See `Kernels.likeliest`."""
        return self.kernels.likeliest(logits)

    def likeliest_after(self, hidden: Tensor) -> Tensor:
        """`likeliest` of the `logits` of hidden states [S, hidden]."""
        return self.likeliest(self.logits(hidden))

    def restrict(self, logits: Tensor, allowed: Allowed) -> Tensor:
        """See `Kernels.restrict`."""
        return self.kernels.restrict(logits, allowed)

    def choose(self, logits: Tensor, choice: TokenChoice) -> Tensor:
        """See `Kernels.choose`."""
        return self.kernels.choose(logits, choice)

    def penalize(self, logits: Tensor, counts: Tensor, penalty: Penalty) -> None:
        """See `Kernels.penalize`."""
        self.kernels.penalize(logits, counts, penalty)

    def accept(self, drawn: Tensor, drafts: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
        """See `Kernels.accept`."""
        return self.kernels.accept(drawn, drafts, first, offsets)


class Decoder(ModelDecoder):
    """A model that is ready to run on one device.

    Args:
        spec: the model, or the part of it that this rank computes.
        weights: its weights, whose layers are moved out of it; their device and dtype are those of the computation.
        kernels: the backend.
        max_model_len: the longest sequence; sizes the rotary tables.
        parallel: connects this rank to those with the other parts.
        greedy: likeliest tokens will be asked for, which the head may be prepared for.
    """

    _counting: Sequence[NativeExperts | OwnExperts] = ()
    """Experts that count their tokens; none while the weights are dropped."""

    def __init__(
        self,
        spec: DecoderSpec | Shard,
        weights: DecoderWeights,
        kernels: Kernels,
        max_model_len: int,
        parallel: Parallel = ONE_PROCESS,
        *,
        greedy: bool = False,
    ) -> None:
        shard = spec if isinstance(spec, Shard) else shard_of(spec)
        self.spec = spec = shard.spec
        self.shape = spec.shape
        super().__init__(kernels)
        self._parallel = parallel
        self.device = weights.embedding.device
        self.dtype = weights.dtype
        first_norm = weights.layers[0].input_norm
        self._recurrent = RecurrentStates(spec.states, kernels.copy) if spec.states else None
        self.states = self._recurrent
        stack = Stack(
            embedding=weights.embedding,
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=self.dtype).item(),
            ropes=tuple(rope_table(rope, max_model_len, self.device) for rope in spec.ropes),
            layers=tuple(self._prepare(weights, layer, index) for index, layer in enumerate(spec.layers)),
            input_norm=first_norm,
            dtype=self.dtype,
            heads=HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim),
            activation=spec.activation,
            eps=spec.norm_eps,
            head_norm=spec.qk_norm or "head",
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            parallel=parallel,
            first_token=shard.vocabulary.begin,
            first=shard.place.first,
            last=shard.place.last,
            recurrent=self._recurrent,
            per_layer=self._per_layer(weights),
            multipliers=spec.multipliers,
            axes=tuple(feature_axes(rope, self.device) for rope in spec.ropes),
        )
        # Experts that wait for the host cannot be recorded, nor mixers by their definition, which reads rows there.
        self.graphed = not any(
            (isinstance(each.feed, Mixture) and each.feed.waits)
            or isinstance(each.mixer, Mixer)
            or each.latent
            for each in stack.layers
        )
        feeds = [layer.feed for layer in stack.layers]
        each = [feed.own or feed.each for feed in feeds if isinstance(feed, Mixture)]
        self._counting = [experts for experts in each if isinstance(experts, (NativeExperts, OwnExperts))]
        self._stack = kernels.prepare_stack(stack)
        self.nbytes = weights.nbytes - sum(map(_saved, _prepared(stack)))
        self.head = self._prepare_head(weights, greedy) if shard.place.last else weights.embedding
        self.use(kernels)

    def _prepare_head(self, weights: DecoderWeights, greedy: bool) -> Any:
        """Prepare the head, and have the embedding in its place in ``weights``; count copies of it."""
        tied, kernels = weights.head is weights.embedding, self.kernels
        head, weights.head = weights.head, weights.embedding
        if isinstance(head, Tensor):
            head = head.to(self.dtype)  # a tied one may be narrow
        prepare = kernels.prepare_head if greedy and self._plain_outputs else kernels.prepare_linear
        prepared = prepare(head, consume=head is not weights.embedding)
        if tied and prepared is not weights.embedding:
            self.nbytes += head.nbytes  # in the kernels' layout, or widened
        screen = getattr(prepared, "screen", None)
        self.nbytes += (0 if screen is None else screen.nbytes) - _saved(prepared)
        return prepared

    def _prepare(self, weights: DecoderWeights, spec: LayerSpec, index: int) -> Layer:
        """Prepare the first remaining layer of ``weights``, and remove it there."""
        prepare = self.kernels.prepare_linear
        layer = weights.layers.pop(0)
        return Layer(
            qkv=Linear(prepare(layer.qkv), layer.qkv_bias),
            output=Linear(prepare(layer.output), layer.output_bias),
            feed=self._feed(layer),
            qk_norm=layer.qk_norm,
            post_attention_norm=layer.post_attention_norm,
            mlp_norm=layer.mlp_norm,
            post_mlp_norm=layer.post_mlp_norm,
            following_norm=weights.layers[0].input_norm if weights.layers else weights.norm,
            window=spec.window,
            rope=spec.rope,
            gates=None if layer.gates is None else Linear(prepare(layer.gates), layer.gates_bias),
            mixer=None if layer.mixer is None else self.kernels.prepare_mixer(layer.mixer),
            states=self.spec.state_keys(index),
            beside=self._beside(layer),
            sinks=layer.sinks,
            heads=spec.heads,
            shares=spec.shares is not None,
            input_gate=self._input_gate(layer),
            scale=1.0 if layer.scale is None else layer.scale.item(),
            latent=self._latent(layer),
            joint=spec.joint,
        )

    def _beside(self, layer: LayerWeights) -> Beside | None:
        """The linear layers of the mixer beside a layer's attention, prepared."""
        first, output = layer.mixer_first, layer.mixer_output
        if first is None or output is None:
            return None
        prepare = self.kernels.prepare_linear
        return Beside(
            Linear(prepare(first), layer.mixer_first_bias), Linear(prepare(output), layer.mixer_output_bias)
        )

    def _latent(self, layer: LayerWeights) -> Latent | None:
        """The attention of a layer over latents, prepared."""
        of, expansion, norm = self.spec.latent, layer.expansion, layer.latent_norm
        if of is None or expansion is None or norm is None:
            return None
        keys, values = (part.contiguous() for part in expansion.split_with_sizes((of.plain, of.value), 1))
        query = None if layer.query is None else Linear(self.kernels.prepare_linear(layer.query), None)
        prepared = self.kernels.prepare_expansion(keys, values)
        return Latent(query, layer.query_norm, norm, keys, values, prepared, LATENT_EPS)

    def _input_gate(self, layer: LayerWeights) -> InputGate | None:
        """What adds its input to a layer, prepared."""
        gate, projection, norm = layer.input_gate, layer.input_projection, layer.input_state_norm
        if gate is None or projection is None or norm is None:
            return None
        prepare = self.kernels.prepare_linear
        return InputGate(Linear(prepare(gate), None), Linear(prepare(projection), None), norm)

    def _per_layer(self, weights: DecoderWeights) -> PerLayerInputs | None:
        """The inputs of all layers, prepared."""
        if weights.per_layer is None:
            return None
        table, projection, norm = weights.per_layer
        padding = 0 if self.spec.per_layer is None else self.spec.per_layer.padding
        return PerLayerInputs(table, Linear(self.kernels.prepare_linear(projection), None), norm, padding)

    def _feed(self, layer: LayerWeights) -> Feed | None:
        """The prepared MLP or experts of a layer, if it has one; an expert is removed there as soon as it is
        prepared.
        """
        prepare, experts = self.kernels.prepare_linear, layer.experts
        if experts is None or layer.router is None or self.spec.experts is None:
            if layer.gate_up is None or layer.down is None:
                return None
            gate_up = Linear(prepare(layer.gate_up), layer.gate_up_bias)
            return Mlp(gate_up, Linear(prepare(layer.down), layer.down_bias))
        router = Router(layer.router, layer.correction, self.spec.experts.routing, layer.router_bias)
        each = []
        while experts:
            one = experts.pop(0)
            gate_up = Linear(prepare(one.gate_up), one.gate_up_bias)
            each.append(Mlp(gate_up, Linear(prepare(one.down), one.down_bias)))
            if len(experts) % _RETURNED_EXPERTS == 0:
                return_freed_memory()  # scales of an expert are too small for the C library to return them at once
        own, count = None, self.spec.experts.routing.experts
        if self.spec.experts.own is not None:
            loads = torch.zeros(count, dtype=torch.int64, device=self.device)
            own = OwnExperts(*self.spec.experts.own, count, loads)
        return Mixture(
            self.kernels.prepare_router(router), self.kernels.prepare_experts(each, self.dtype), own
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Write the batch's keys and values to ``kv``; float32 logits [S, vocab] of ``logits_indices``."""
        return self.logits(self.hidden(batch, kv)).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, vocab] of hidden states [S, hidden]: see `Kernels.logits`; in float32 if a softcap applies."""
        logits = self._parallel.logits(hidden, self.project)
        if self.spec.logits_scale != 1.0:
            logits.mul_(self.spec.logits_scale)
        if self.spec.logits_softcap is not None:
            logits = logits.float()
            logits.div_(self.spec.logits_softcap).tanh_().mul_(self.spec.logits_softcap)
        return logits

    def likeliest_after(self, hidden: Tensor) -> Tensor:
        """See `ModelDecoder.likeliest_after`: without storing logits where they are the outputs of the head."""
        if not self._plain_outputs:
            return super().likeliest_after(hidden)
        tokens: Tensor = self.kernels.likeliest_outputs(hidden, self.head)
        return tokens

    @property
    def _plain_outputs(self) -> bool:
        """Whether the logits are the outputs of this rank's head."""
        plain = self.spec.logits_scale == 1.0 and self.spec.logits_softcap is None
        return plain and self._parallel is ONE_PROCESS

    def expert_loads(self) -> list[list[int]]:
        """See `ModelDecoder.expert_loads`."""
        if not self._counting or self.spec.experts is None:
            return []
        return [each.loads[: self.spec.experts.routing.experts].tolist() for each in self._counting]

    def project(self, hidden: Tensor) -> Tensor:
        """The logits [S, N] of the N tokens that this rank's part of the head has."""
        logits: Tensor = self.kernels.logits(hidden, self.head)
        return logits

    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Like `forward`, but returns the last hidden states [S, hidden], after the final norm."""
        with nullcontext() if self._recurrent is None else self._recurrent.step(batch):
            states = self.kernels.run_stack(self._stack, batch, kv.layers)
        return self._parallel.hidden(states, len(batch.logits_indices))

    def use(self, kernels: Kernels) -> None:
        """See `ModelDecoder.use`."""
        super().use(kernels)
        self._greedy = kernels.prepare_greedy(self._stack, self.head) if self._plain_outputs else None

    def greedy(self, batch: Batch, kv: PagedKV) -> Counts | None:
        """See `ModelDecoder.greedy`."""
        if self._greedy is None:
            return None
        with nullcontext() if self._recurrent is None else self._recurrent.step(batch):
            return self._greedy(batch, kv.layers)

    def prepare_adapter(self, layers: LayerChanges) -> Any:
        """An adapter for `batch.AdapterTokens`, from its changes in host memory; any thread may call it.

        Raises:
            ValueError: it does not fit the model.
        """
        check_changes(layers, [_sizes(self.spec, index) for index in range(self.spec.num_layers)])
        return self.kernels.prepare_adapter(to_device(layers, self.device), self._stack)

    def draft(self, batch: Batch, kv: PagedKV, most: Counts, least: float) -> Drafted | None:
        """See `Kernels.draft`."""
        plain = self.spec.logits_softcap is None and self.spec.logits_scale == 1.0
        if not plain or self._parallel is not ONE_PROCESS:
            return None
        return self.kernels.draft(self._stack, self.head, batch, kv.layers, most, least)


def _prepared(stack: Stack) -> Iterator[Any]:
    """The weights of all linear layers, as the kernels prepared them."""
    for layer in stack.layers:
        yield from (linear.weight for linear in layer.linears)
        if isinstance(layer.feed, Mixture) and isinstance(layer.feed.each, NativeExperts):
            yield from (linear.weight for mlp in layer.feed.each.each for linear in mlp)
    if stack.per_layer is not None:
        yield stack.per_layer.projection.weight


def _saved(weight: Any) -> int:
    """The bytes by which a prepared weight is smaller than it was."""
    return weight.saved if isinstance(weight, PackedWeight) else 0


def _sizes(spec: DecoderSpec, layer: int) -> dict[str, tuple[int, int]]:
    """The sizes [outputs, inputs] of the linear layers of a layer, with those of experts by `of_expert`."""
    places = dict(linear_places(spec, layer))
    for expert, pair in enumerate(expert_places(spec, layer)):
        places |= {of_expert(name, expert): place for name, place in zip(OF_EXPERTS, pair, strict=True)}
    return {name: (sum(place.modules.values()), place.inputs) for name, place in places.items()}
