"""The encoder families as data: the fields of their configs, and the names of their tensors.

A family of BERT's shape is an entry of `FAMILIES`. What is not supported is rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.families import MAX_LAYERS

# The sizes and options of an encoder, as frozen values; `families` reads them from a ``config.json``.


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes in elements; ``first_position`` is the row of the position table for the first token.

    ``num_labels`` is the number of outputs of a classification head, if the checkpoint has one. ``layers`` are those
    of an encoder with rotary positions.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    norm_eps: float
    first_position: int = 0
    num_labels: int = 1
    layers: tuple[RotaryLayer, ...] = ()
    classifier_pooling: str = "cls"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class RotaryLayer:
    """One layer: base of its rotary positions, and how far to each side a token attends (None: to all tokens)."""

    theta: float
    reach: int | None


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of the tensors of a layer; ``{}`` in ``layer`` is its number."""

    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attended: str = "attention.output.dense"
    attended_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    down_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True)
class Family:
    """How an encoder differs from BERT.

    ``padded_positions``: positions are counted from after the padding id, which ``padding`` fixes or the config names.
    ``typed``: tokens of the second text have another embedding. ``relative``: the attention has a bias by distance.
    ``head`` is the shape of its classification head (see `heads`). ``fields`` are names in its config that are not
    BERT's.
    """

    names: LayerNames = LayerNames()
    padded_positions: bool = False
    padding: int | None = None
    typed: bool = True
    relative: bool = False
    head: str = "bert"
    fields: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


_BERT = {"position_embedding_type": "absolute", "hidden_act": "gelu", "layer_norm_eps": 1e-12}
_ROBERTA = Family(padded_positions=True, head="roberta", defaults=_BERT)

FAMILIES: Mapping[str, Family] = {
    "bert": Family(defaults=_BERT),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        LayerNames(
            layer="transformer.layer.{}.",
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            attended="attention.out_lin",
            attended_norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            down_norm="output_layer_norm",
        ),
        typed=False,
        head="distilbert",
        fields={
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_act": "activation",
        },
        defaults=_BERT | {"activation": "gelu"},
    ),
    "mpnet": Family(
        LayerNames(
            query="attention.attn.q",
            key="attention.attn.k",
            value="attention.attn.v",
            attended="attention.attn.o",
            attended_norm="attention.LayerNorm",
        ),
        padded_positions=True,
        padding=1,
        typed=False,
        relative=True,
        head="roberta",
        defaults=_BERT | {"relative_attention_num_buckets": 32},
    ),
}
"""By the ``model_type`` of a config."""

MODERN = "modernbert"
SUPPORTED = (*FAMILIES, MODERN)

_MODERN_DEFAULTS = {
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "classifier_pooling": "cls",
}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes an encoder of one of the families."""
    return config.get("model_type") in SUPPORTED


def parse_encoder_config(config: Mapping[str, Any]) -> EncoderSpec:
    """The sizes in a ``config.json``.

    Raises:
        ModelError: the encoder is of another kind, or a field is missing or not supported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in SUPPORTED:
        raise ModelError(f"encoder type {name!r:.80} is not supported; supported are {', '.join(SUPPORTED)}")
    if name == MODERN:
        return _modern(config)
    family = FAMILIES[name]
    read = ConfigReader(name, config, family.defaults)

    def field_of(bert: str) -> str:
        return family.fields.get(bert, bert)

    _only_gelu(read, field_of("hidden_act"))
    if read.get("position_embedding_type") not in ("absolute", None):
        raise ModelError(f"{name}: only absolute positions are supported")
    if family.relative and read.integer("relative_attention_num_buckets") != 32:
        raise ModelError(f"{name}: only 32 relative_attention_num_buckets are supported")
    padding = family.padding or (0 if read.get("pad_token_id") is None else read.count("pad_token_id"))
    first = padding + 1 if family.padded_positions else 0
    return EncoderSpec(
        family=name,
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer(field_of("hidden_size")),
        intermediate_size=read.integer(field_of("intermediate_size")),
        num_layers=_layers(read, field_of("num_hidden_layers")),
        num_heads=read.integer(field_of("num_attention_heads")),
        max_tokens=read.integer("max_position_embeddings") - first,
        norm_eps=read.number("layer_norm_eps"),
        first_position=first,
        num_labels=_labels(config),
    )


def _layers(read: ConfigReader, field: str) -> int:
    count = read.integer(field)
    if count > MAX_LAYERS:
        raise ModelError(f"{read.architecture}: {field} must be at most {MAX_LAYERS}, the config has {count}")
    return count


def _modern(config: Mapping[str, Any]) -> EncoderSpec:
    read = ConfigReader(MODERN, config, _MODERN_DEFAULTS)
    _only_gelu(read, "hidden_activation")
    for flag in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        if read.flag(flag):
            raise ModelError(f"{MODERN}: {flag} is not supported")
    if read.get("classifier_pooling") not in ("cls", "mean"):
        raise ModelError(
            f"{MODERN}: classifier_pooling {read.get('classifier_pooling')!r:.80} is not supported, only cls or mean"
        )
    count = _layers(read, "num_hidden_layers")
    kinds = read.names("layer_types")
    if kinds is None:
        every = read.integer("global_attn_every_n_layers")
        kinds = ["sliding_attention" if index % every else "full_attention" for index in range(count)]
    if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{MODERN}: layer_types must name full_attention or sliding_attention for each layer"
        )
    reach = read.integer("local_attention") // 2
    layers = {
        "full_attention": RotaryLayer(_theta(read, "full_attention", "global_rope_theta"), None),
        "sliding_attention": RotaryLayer(_theta(read, "sliding_attention", "local_rope_theta"), reach),
    }
    return EncoderSpec(
        family=MODERN,
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=count,
        num_heads=read.integer("num_attention_heads"),
        max_tokens=read.integer("max_position_embeddings"),
        norm_eps=read.number("norm_eps"),
        num_labels=_labels(config),
        layers=tuple(layers[kind] for kind in kinds),
        classifier_pooling=str(read.get("classifier_pooling")),
    )


def _theta(read: ConfigReader, kind: str, older: str) -> float:
    """The base of a kind of layer: newer configs have an object for each kind, older ones a number."""
    inner = ConfigReader(MODERN, ConfigReader(MODERN, read.object("rope_parameters"), {}).object(kind), {})
    if inner.get("rope_type") not in ("default", None):
        raise ModelError(f"{MODERN}: rope_type {inner.get('rope_type')!r:.80} is not supported")
    return inner.optional_number("rope_theta") or read.number(older)


def _only_gelu(read: ConfigReader, name: str) -> None:
    if read.get(name) != "gelu":
        raise ModelError(f"{read.architecture}: {name} {read.get(name)!r:.80} is not supported, only gelu")


def _labels(config: Mapping[str, Any]) -> int:
    named = config.get("id2label")
    if isinstance(named, Mapping):
        return max(1, len(named))
    count = config.get("num_labels", 2)
    return count if isinstance(count, int) and count > 0 else 2
