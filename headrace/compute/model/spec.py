"""The specification of a model for the generic decoder, as frozen values.

`families` creates it from a ``config.json``; decoder and weights read it. It yields the `ModelShape` that all
others read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headrace.compute.kernels import Activation, HeadNorm, HeadShape
from headrace.compute.kernels.experts import Routing
from headrace.compute.kernels.mixers import NO_MULTIPLIERS, Multipliers
from headrace.compute.model.mixers import MixerSpec
from headrace.compute.model.shape import LayerShape, ModelShape
from headrace.compute.quantization.scheme import StoredFormat
from headrace.compute.states import StateShape, row_bytes
from headrace.core.capacity import SparseLayers

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "none"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding (arXiv:2104.09864) and how it is stretched beyond the trained length.

    ``rotary_dim`` features of each head rotate, at base ``theta``. ``original_positions`` is the trained length. Of
    kind "none" nothing rotates: layers without positions (arXiv:2305.19466) have a table of ones and zeros. Of kind
    "proportional" only the first ``share`` of pairs rotates.
    ``factor``: linear, dynamic (NTK-aware), llama3, yarn. ``low_freq_factor``, ``high_freq_factor``: llama3.
    ``beta_fast``, ``beta_slow``, ``truncate``: yarn (arXiv:2309.00071). ``short_factor``, ``long_factor``: longrope
    (arXiv:2402.13753). ``attention_factor`` scales cosines and sines. ``axes`` (M-RoPE, arXiv:2409.12191): by which
    position of an image's token each pair rotates, time (0), row (1) or column (2); empty: tokens have one position.
    """

    theta: float
    rotary_dim: int
    original_positions: int
    kind: RopeKind = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0
    axes: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        """The positions that it is stretched to; configs with llama3 and longrope give that as their context
        already.
        """
        stretched = self.kind in ("linear", "dynamic", "yarn")
        return int(self.original_positions * self.factor) if stretched else self.original_positions

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in its table: a cosine and a sine for every rotated feature, in float32."""
        return 2 * self.rotary_dim * 4


class ExpertNames(NamedTuple):
    """The names of a layer's experts in a checkpoint, below the layer: of ``block``, and of modules in it.

    ``gate``, ``up`` and ``down`` are linears of each expert, ``correction`` is the tensor of the scores' correction.
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"


EXPERT_NAMES = ExpertNames()
"""The names in most checkpoints."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of the layers that have some: how a token's are chosen, and the width of each.

    The shared expert is ``shared_width`` wide. ``corrected``: the scores have a correction. ``biased``: the router and
    the experts' linears have biases. ``interleaved``: tensors of all experts have a gate's outputs and those that it
    multiplies by turns, and are stored as [inputs, outputs] unless they are quantized (gpt-oss). Of experts that are
    divided between ranks, ``own`` are those of this rank: the first one and their number.
    """

    routing: Routing
    width: int
    shared_width: int = 0
    corrected: bool = False
    names: ExpertNames = EXPERT_NAMES
    biased: bool = False
    interleaved: bool = False
    own: tuple[int, int] | None = None

    @property
    def held(self) -> int:
        """The number of experts that are loaded, without the shared one."""
        return self.routing.experts if self.own is None else self.own[1]

    @property
    def used(self) -> int:
        """The number of these that compute a token, on average."""
        return max(1, round(self.routing.chosen * self.held / self.routing.experts))

    def parameters(self, hidden: int, experts: int, linears: int) -> int:
        """The weights of the router, the shared expert and so many others, each of so many ``linears``."""
        linears *= hidden * (experts * self.width + self.shared_width)
        return self.routing.outputs * hidden + linears


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Options of one layer: keys that a token attends to, itself included (None: all), and the index of its rope.

    ``experts``: it has experts in place of an MLP. ``feeds``: it has one of them. ``recurrent``: it has the model's
    mixer in place of attention, or ``beside`` it.
    ``heads`` and ``intermediate_size`` are its own, None: those of the model. A layer that ``shares`` reads keys and
    values of that earlier layer. ``values_from_keys``: values are the product of the keys' weights too, before their
    norm and rotation. ``joint``: tokens of an image attend to each other both ways.
    """

    window: int | None = None
    rope: int = 0
    experts: bool = False
    recurrent: bool = False
    beside: bool = False
    feeds: bool = True
    heads: HeadShape | None = None
    intermediate_size: int | None = None
    shares: int | None = None
    values_from_keys: bool = False
    joint: bool = False

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.beside or not self.recurrent


class PerLayerSpec(NamedTuple):
    """Gemma's input of each layer: ``width`` features, from a table of ``vocab_size`` tokens and from the embedding.

    At positions of images the row of the table is that of the token ``padding``.
    """

    vocab_size: int
    width: int
    padding: int = 0


class Norms(NamedTuple):
    """The norms over the hidden state of a layer, by their fields of `weights.LayerWeights`: names, or None.

    ``input_norm`` and ``mlp_norm`` normalize what attention and MLP read. ``post_attention_norm`` and
    ``post_mlp_norm`` normalize what they return, before it is added to the residual.
    """

    input_norm: str | None = "input_layernorm"
    post_attention_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    post_mlp_norm: str | None = None


NORMS_BEFORE = Norms()
"""The norms of a Llama's layer."""


class ModuleNames(NamedTuple):
    """The names of modules in a checkpoint: below a layer the MLP and its linears (``gate_up`` if they are stored as
    one), below ``self_attn`` the output and the norms of heads (None: the usual ones); and the last norm.
    """

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    output: str = "o_proj"
    query_norm: str | None = None
    key_norm: str | None = None
    final_norm: str = "model.norm"


MODULE_NAMES = ModuleNames()
"""The names in most checkpoints."""


class LatentSpec(NamedTuple):
    """Latent keys and values (arXiv:2405.04434): a token keeps ``rank`` features, and ``rotary`` ones of its keys.

    A head has ``plain`` and ``rotary`` features of queries and keys, and ``value`` ones of values. Queries come from
    ``query_rank`` features, None: from the hidden state.
    """

    rank: int
    rotary: int
    plain: int
    value: int
    query_rank: int | None

    @property
    def kept(self) -> int:
        """The features that a token keeps."""
        return self.rank + self.rotary

    @property
    def head(self) -> int:
        """The features of a head's queries."""
        return self.plain + self.rotary


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape and options of the generic decoder; sizes in elements.

    ``attention_scale`` multiplies q·k. ``attention_softcap`` and ``logits_softcap`` bound with tanh
    (arXiv:2408.00118). ``sinks``: attention has those of `Kernels.paged_attention`. ``qk_norm`` normalizes queries
    and keys: see `kernels.HeadNorm`. ``norm_offset`` is added to every norm weight. ``norms`` are those of each layer.
    ``experts`` are those of the layers that have some. A checkpoint may have ``draft_layers`` behind its layers, which
    are not computed. ``merged_qkv`` and
    ``merged_gate_up``: the files already contain q, k, v or gate, up as one. ``interleaved_rope``: their heads rotate
    pairs of neighbours, so queries and keys are reordered when they are read. ``nested_checkpoint``: they also contain
    other parts of a larger model (a vision tower). ``dtype`` is the dtype of the stored weights according to the
    config, ``stored`` the format of its linears if they are quantized.

    A model may multiply the outputs of attention and MLP (Granite). Where norms follow them, their weights contain
    this ``output_scale`` when they are loaded. Otherwise the hidden state between the layers is ``residual_scale``
    times, its inverse, that of the published model: ``embedding_scale`` and ``norm_eps`` contain it. ``logits_scale``
    multiplies the logits.

    ``mixer`` is that of the recurrent layers. ``gated_attention``: what attention returns is multiplied with the
    sigmoid of gates, which are stored behind each head's queries. ``names`` are those of the checkpoint's modules.
    ``layer_scales``: each layer has a number that its result is multiplied by. ``per_layer`` is the input of each
    layer, if it has one. ``latent``: its layers keep latents in place of keys and values. ``multipliers`` are those
    of layers whose mixer is beside attention. ``renamed`` are beginnings of a checkpoint's names, and what they are
    here.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: Activation
    attention_scale: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: HeadNorm | None = None
    norm_offset: float = 0.0
    norms: Norms = NORMS_BEFORE
    interleaved_rope: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    output_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    sinks: bool = False
    tied_embeddings: bool = False
    merged_qkv: bool = False
    merged_gate_up: bool = False
    nested_checkpoint: bool = False
    dtype: str = "bfloat16"
    stored: StoredFormat | None = None
    experts: ExpertsSpec | None = None
    draft_layers: int = 0
    mixer: MixerSpec | None = None
    gated_attention: bool = False
    names: ModuleNames = MODULE_NAMES
    layer_scales: bool = False
    per_layer: PerLayerSpec | None = None
    latent: LatentSpec | None = None
    multipliers: Multipliers = NO_MULTIPLIERS
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def gated(self) -> bool:
        """Whether its MLPs and experts have gates."""
        return self.activation != "squared_relu"

    def heads_of(self, index: int) -> HeadShape:
        """The heads of a layer. Those over latents have these as their keys."""
        if self.latent is not None:
            return HeadShape(self.num_heads, 1, self.latent.kept)
        return self.layers[index].heads or HeadShape(self.num_heads, self.num_kv_heads, self.head_dim)

    def intermediate_of(self, index: int) -> int:
        """The width of a layer's MLP."""
        return self.layers[index].intermediate_size or self.intermediate_size

    @property
    def alike(self) -> bool:
        """Whether its layers have the same heads and widths, and each its own weights of keys and values."""
        return (
            self.per_layer is None
            and self.latent is None
            and not any(
                layer.heads or layer.intermediate_size or layer.shares is not None or layer.values_from_keys
                for layer in self.layers
            )
        )

    @property
    def reach(self) -> int:
        """The longest context: ``max_positions``, or the stretched length of all ropes if the config names a shorter
        one.
        """
        return max(self.max_positions, min(rope.reach for rope in self.ropes))

    @property
    def num_parameters(self) -> int:
        """Number of weights of all matrices and norms (without biases)."""
        return self._parameters(0 if self.experts is None else self.experts.held)

    @property
    def token_parameters(self) -> int:
        """Number of these that one token is computed with."""
        return self._parameters(0 if self.experts is None else self.experts.used) - self.lookup_parameters

    @property
    def lookup_parameters(self) -> int:
        """Number of these in the table of each layer's input, of which a token reads one row."""
        return 0 if self.per_layer is None else self.per_layer.vocab_size * self.per_layer_features

    @property
    def per_layer_features(self) -> int:
        """The features of all layers' inputs of a token."""
        return 0 if self.per_layer is None else self.num_layers * self.per_layer.width

    @property
    def sparse_layers(self) -> int:
        """The number of layers with experts."""
        return sum(layer.experts for layer in self.layers)

    @property
    def recurrent_layers(self) -> int:
        """The number of layers with a mixer."""
        return sum(layer.recurrent for layer in self.layers)

    @property
    def states(self) -> dict[Hashable, StateShape]:
        """The recurrent states of a sequence, by layer and number."""
        each = () if self.mixer is None else self.mixer.states
        recurrent = (index for index, layer in enumerate(self.layers) if layer.recurrent)
        return {
            key: state for index in recurrent for key, state in zip(self.state_keys(index), each, strict=True)
        }

    def norms_of(self, index: int) -> dict[str, str]:
        """The norms over the hidden state of a layer: field of `weights.LayerWeights` -> name."""
        names = self.norms._asdict()
        inner = ("mlp_norm", "post_mlp_norm") if not self.layers[index].feeds else ()
        return {field: name for field, name in names.items() if name and field not in inner}

    def state_keys(self, layer: int) -> tuple[Hashable, ...]:
        """The keys of the states of a layer: the layer and a number."""
        if self.mixer is None or not self.layers[layer].recurrent:
            return ()
        return tuple((layer, number) for number in range(len(self.mixer.states)))

    @property
    def inner_size(self) -> int:
        """The widest inner product of a token, over all of its experts, and the inputs of its layers beside it.

        A mixer's activations are added, a third each, because memory for those of one width serves few of the other.
        """
        return self._widest_inner + (-(-self.mixer.features // 3) if self.mixer is not None else 0)

    @property
    def _widest_inner(self) -> int:
        layers = enumerate(self.layers)
        widths = [self.intermediate_of(index) for index, layer in layers if layer.feeds and not layer.experts]
        if self.experts is not None and self.sparse_layers:
            widths.append(self.experts.routing.chosen * self.experts.width + self.experts.shared_width)
        return max(widths) + self.per_layer_features

    def _parameters(self, experts: int) -> int:
        """The weights with so many experts in a layer."""
        norms = sum(len(self.norms_of(index)) for index in range(self.num_layers)) * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        layers = norms + sum(map(self._dense_parameters, range(self.num_layers)))
        if self.per_layer is not None:  # table and projection, gate, projection and norm of each layer
            tables += (
                self.lookup_parameters + self.hidden_size * self.per_layer_features + self.per_layer.width
            )
            layers += self.hidden_size * (2 * self.per_layer_features + self.num_layers)
        if self.experts is not None:
            layers += self.sparse_layers * self.experts.parameters(self.hidden_size, experts, 2 + self.gated)
        return layers + tables + self.hidden_size

    def _dense_parameters(self, index: int) -> int:
        """The weights of attention or of the mixer in a layer, and of its MLP if it has one."""
        layer, (heads, kv_heads, head_dim) = self.layers[index], self.heads_of(index)
        kinds = 0 if layer.shares is not None else 1 if layer.values_from_keys else 2
        attention = self.hidden_size * head_dim * ((2 + self.gated_attention) * heads + kinds * kv_heads)
        if self.latent is not None:
            attention = self._latent_parameters(self.latent)
        if self.mixer is not None and layer.recurrent:
            attention = self.mixer.parameters(self.hidden_size) + (attention if layer.beside else 0)
        linears = (2 + self.gated) * layer.feeds if not layer.experts else 0
        return attention + linears * self.hidden_size * self.intermediate_of(index)

    def _latent_parameters(self, of: LatentSpec) -> int:
        """The weights of attention over latents in a layer."""
        queries, hidden = self.num_heads * of.head, self.hidden_size
        narrow = of.query_rank
        query = hidden * queries if narrow is None else narrow * (hidden + queries + 1)
        expansion = of.rank * (self.num_heads * (of.plain + of.value) + 1)
        return query + hidden * of.kept + expansion + self.num_heads * of.value * hidden

    @property
    def shape(self) -> ModelShape:
        """The sizes for memory, cost and reports."""
        return ModelShape(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.inner_size,
            layers=tuple(
                LayerShape(self.heads_of(index), layer.window, layer.shares, self.latent is not None)
                for index, layer in enumerate(self.layers)
                if layer.attends
            ),
            max_positions=self.max_positions,
            reach=self.reach,
            position_bytes=sum(rope.position_bytes for rope in self.ropes),
            num_parameters=self.num_parameters,
            token_parameters=self.token_parameters,
            lookup_parameters=self.lookup_parameters,
            tied_embeddings=self.tied_embeddings,
            dtype=self.dtype,
            state_bytes=row_bytes(self.states),
            residual_scale=self.residual_scale,
            sparse=self._sparse(),
            recurrent_layers=self.recurrent_layers,
        )

    def _sparse(self) -> SparseLayers | None:
        if self.experts is None:
            return None
        size = (2 + self.gated) * self.hidden_size * self.experts.width
        return SparseLayers(self.sparse_layers, self.experts.held, self.experts.used, size)
