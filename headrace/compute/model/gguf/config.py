"""The config of the model in a GGUF file: the fields of the ``config.json`` that it was made from.

`model.families` reads them like those of a folder, so that a family is described in one place. What is written in no
field comes from the tensors: biases, a head of its own, and the factors of stretched rotary embeddings. A field of the
architecture that is not listed here is refused, because it could change the results.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.gguf.file import GgufFile

QUANTIZATION_VERSION = 2
"""The version of the layouts of quantized blocks."""

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Fields of every architecture, and their names in a ``config.json``."""

_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_PATTERN, _VALUE_LENGTH, _ROTATED = (
    "attention.sliding_window_pattern",
    "attention.value_length",
    "rope.dimension_count",
)
_READ_ELSEWHERE = frozenset({_PATTERN, _VALUE_LENGTH, _ROTATED, "vocab_size", "tensor_data_layout"})
_ONLY: dict[str, Any] = {
    "attention.causal": True,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "use_parallel_residual": False,
}
"""Fields that are supported with one value."""

_COUNT, _USED, _WIDTH, _SHARED_WIDTH = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)
_WITHOUT_EXPERTS: dict[str, Any] = {_COUNT: 0, _USED: 0}
_ROUTING: dict[str, Any] = {
    "expert_gating_func": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
}
"""Fields of routing that are supported with one value: the softmax of all logits, in one group."""

_SCALING = "rope.scaling."
_YARN = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}


def _by_head(config: Mapping[str, Any]) -> float:
    """The divisor under the square root of attention scores: the size of a head."""
    return float(config.get("head_dim", 0))


def _by_size(largest: int) -> Callable[[Mapping[str, Any]], float]:
    """As `_by_head`, except in the largest model of a family, which only its number of layers tells."""

    def scalar(config: Mapping[str, Any]) -> float:
        if config["num_hidden_layers"] == largest:
            return float(config["hidden_size"] / config["num_attention_heads"])
        return _by_head(config)

    return scalar


class _Experts(NamedTuple):
    """How an architecture routes: ``name`` in a ``config.json``, and there the field with the ``number`` of experts.

    ``normalized``: the weights of the chosen are divided by their sum. It is a field of a ``config.json`` where
    ``given``. ``width`` and ``shared``: the names of the widths of an expert and the shared one, where they are not
    that of an MLP.
    """

    name: str
    number: str
    normalized: bool
    given: bool = False
    width: str | None = None
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class _Architecture:
    """``name`` in a ``config.json``; ``fields`` besides the common ones; ``scalar``: ``query_pre_attn_scalar``.

    ``partial``: a part of each head may rotate. ``experts``: its models may have experts.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    scalar: Callable[[Mapping[str, Any]], float] | None = None
    partial: bool = False
    experts: _Experts | None = None


_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_QWEN2_EXPERTS = _Experts(
    "Qwen2MoeForCausalLM",
    "num_experts",
    normalized=False,
    given=True,
    width="moe_intermediate_size",
    shared="shared_expert_intermediate_size",
)
_QWEN3_EXPERTS = _Experts(
    "Qwen3MoeForCausalLM", "num_experts", normalized=True, given=True, width="moe_intermediate_size"
)

ARCHITECTURES: dict[str, _Architecture] = {
    "gemma": _Architecture("GemmaForCausalLM"),
    "gemma2": _Architecture("Gemma2ForCausalLM", _WINDOW | _SOFTCAPS, _by_size(46)),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM",
        _WINDOW | _SOFTCAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        _by_size(62),
    ),
    "granite": _Architecture("GraniteForCausalLM", _GRANITE),
    "granitemoe": _Architecture(
        "GraniteMoeForCausalLM",
        _GRANITE,
        experts=_Experts("GraniteMoeForCausalLM", "num_local_experts", normalized=True),
    ),
    "llama": _Architecture(
        "LlamaForCausalLM", experts=_Experts("MixtralForCausalLM", "num_local_experts", normalized=True)
    ),
    "olmoe": _Architecture(
        "OlmoeForCausalLM", experts=_Experts("OlmoeForCausalLM", "num_experts", normalized=False, given=True)
    ),
    "phi3": _Architecture(
        "Phi3ForCausalLM",
        _WINDOW | {f"{_SCALING}original_context_length": "original_max_position_embeddings"},
        partial=True,
    ),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", experts=_QWEN2_EXPERTS),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", experts=_QWEN3_EXPERTS),
}
"""By ``general.architecture``. Models of Mistral, Mixtral and SmolLM2 are llama."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """The fields of a ``config.json`` for the model in ``file``.

    Raises:
        ModelError: the architecture or a field is not supported, or the metadata do not fit the tensors.
    """
    read = _Metadata(file)
    architecture = read.architecture
    read.check(architecture)
    config: dict[str, Any] = {"architectures": [architecture.name]}
    for key, name in (_FIELDS | dict(architecture.fields)).items():
        if (value := read.get(key)) is not None:
            config[name] = value
    if config.get("sliding_window") == 0:  # says that there is none
        config["sliding_window"] = None
    _read_pattern(read, config)
    _read_tensors(file, config)
    of = architecture.experts
    if of is not None and (of.name == architecture.name or read.get(_COUNT, 0)):
        config |= _experts(read, file, of)
    head = config.get("head_dim") or _whole_head(read, config)
    config["head_dim"] = head
    if read.get(_VALUE_LENGTH, head) != head:
        raise read.error(_VALUE_LENGTH, f"values as long as keys, {head}, are supported")
    if architecture.scalar is not None:
        config["query_pre_attn_scalar"] = architecture.scalar(config)
    rotated = read.get(_ROTATED, head)
    if rotated != head and not architecture.partial:
        raise read.error(_ROTATED, f"whole heads rotate in this architecture, {head} features")
    if rotated != head:
        config["partial_rotary_factor"] = rotated / head
    if scaling := _scaling(read, file):
        config["rope_scaling"] = scaling
    return config


def generation_of(file: GgufFile) -> dict[str, Any]:
    """The fields of a ``generation_config.json``: the recommended sampling parameters, if the file has some."""
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    values = {name: file.metadata.get(f"general.sampling.{key}") for key, name in names.items()}
    return {name: _shortest(value) for name, value in values.items() if value is not None}


class _Metadata:
    """The metadata of the architecture, by keys without its name."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        named = file.metadata.get("general.architecture")
        if not isinstance(named, str) or named not in ARCHITECTURES:
            raise ModelError(
                f"{file.path}: the GGUF architecture {named!r:.80} is not supported; supported are:"
                f" {', '.join(ARCHITECTURES)}; give the original model in safetensors"
            )
        self.architecture = ARCHITECTURES[named]
        self._prefix = f"{named}."

    def get(self, key: str, default: Any = None) -> Any:
        """A value; one of float32 as the shortest decimal number that means it, as a config would have it."""
        return _shortest(self._file.metadata.get(f"{self._prefix}{key}", default))

    def integer(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or value < 1:
            raise self.error(key, "a positive number is expected")
        return value

    def error(self, key: str, reason: str) -> ModelError:
        return ModelError(f"{self._file.path}: {self._prefix}{key} is {self.get(key)!r:.80}; {reason}")

    def check(self, architecture: _Architecture) -> None:
        """Refuse fields that are not known, and values that are not supported."""
        kind = self._file.metadata.get("general.type", "model")
        if kind != "model":
            raise ModelError(
                f"{self._file.path} is a file of type {kind!r:.80}, not a model; name the model's file"
            )
        version = self._file.metadata.get("general.quantization_version", QUANTIZATION_VERSION)
        if version != QUANTIZATION_VERSION:
            raise ModelError(
                f"{self._file.path}: general.quantization_version is {version!r:.80}, and {QUANTIZATION_VERSION} is"
                " supported; convert the model again with a current converter"
            )
        of = architecture.experts
        only = _ONLY | (_WITHOUT_EXPERTS if of is None else _ROUTING | {"expert_weights_norm": of.normalized})
        widths = {_WIDTH: of.width, _SHARED_WIDTH: of.shared} if of else {}
        counts = {_COUNT, _USED, *(key for key, name in widths.items() if name)} if of else set()
        known = _FIELDS.keys() | architecture.fields.keys() | _READ_ELSEWHERE | only.keys() | counts
        for key in self._file.metadata:
            own = key.removeprefix(self._prefix)
            if own != key and own not in known and not own.startswith(_SCALING):
                raise self.error(own, "this field is not supported")
        for own, value in only.items():
            if self.get(own, value) != value:
                raise self.error(own, f"only {value!r:.80} is supported")


def _read_pattern(read: _Metadata, config: dict[str, Any]) -> None:
    """Which layers have the sliding window, where the file says so and the family does not."""
    pattern = read.get(_PATTERN)
    if isinstance(pattern, tuple):
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern


def _read_tensors(file: GgufFile, config: dict[str, Any]) -> None:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    kinds = {
        tensor.type.name
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and ".ffn_gate_inp" not in name  # routers are float32 in every file
    }
    plain = {"F32": "float32", "F16": "float16"} if len(kinds) == 1 else {}
    config["dtype"] = plain.get(min(kinds), "bfloat16")


def _experts(read: _Metadata, file: GgufFile, of: _Experts) -> dict[str, Any]:
    """The fields of experts. Older files have no widths, which are those of the tensors."""
    fields: dict[str, Any] = {
        "architectures": [of.name],
        of.number: read.integer(_COUNT),
        "num_experts_per_tok": read.integer(_USED),
    }
    if of.given:
        fields["norm_topk_prob"] = of.normalized
    widths = {(_WIDTH, "ffn_down_exps"): of.width, (_SHARED_WIDTH, "ffn_down_shexp"): of.shared}
    for (key, tensor), name in widths.items():
        stored = file.tensors.get(f"blk.0.{tensor}.weight")
        if name is not None:
            fields[name] = read.get(key) or (0 if stored is None else stored.shape[-1])
    return fields


def _whole_head(read: _Metadata, config: Mapping[str, Any]) -> int:
    hidden, heads = read.integer("embedding_length"), read.integer("attention.head_count")
    return hidden // heads


def _scaling(read: _Metadata, file: GgufFile) -> dict[str, Any]:
    """How the rotary embedding is stretched, as ``rope_scaling``; empty: it is not."""
    given = {
        key.partition(_SCALING)[2]: read.get(_SCALING + key.partition(_SCALING)[2])
        for key in file.metadata
        if _SCALING in key
    }
    kind, original = given.pop("type", "none"), given.pop("original_context_length", None)
    factor, attention = given.pop("factor", None), given.pop("attn_factor", None)
    given.pop("finetuned", None)
    yarn = {name: given.pop(key) for key, name in _YARN.items() if kind == "yarn" and key in given}
    if given:
        raise read.error(_SCALING + min(given), "this field is not supported")
    short, long = _factors(file, "rope_factors_short.weight"), _factors(file, "rope_factors_long.weight")
    freqs = _factors(file, "rope_freqs.weight")
    if short or long or freqs:
        if kind not in ("none", "longrope") or bool(short) != bool(long):
            raise ModelError(
                f"{file.path} has factors of its rotary embedding, and {_SCALING}type {kind!r:.80}"
            )
        return {
            "rope_type": "longrope",
            "short_factor": short or freqs,
            "long_factor": long or freqs,
            "attention_factor": attention or 1.0,
            "original_max_position_embeddings": original if short else read.get("context_length"),
        }
    if attention not in (None, 1.0):
        raise read.error(f"{_SCALING}attn_factor", "it is supported with factors of the rotary embedding")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise read.error(f"{_SCALING}type", "supported are: none, linear, yarn, longrope")
    scaling = {"rope_type": kind, "factor": factor} | yarn
    return scaling | ({"original_max_position_embeddings": original} if kind == "yarn" else {})


def _factors(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None:
        return []
    if tensor.type.name != "F32":
        raise ModelError(f"{file.path}: {name} must be F32, and is {tensor.type.name}")
    return [float(value) for value in file.data(tensor).reshape(-1).view(np.float32)]


def _shortest(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value
