"""The shapes of published models, as in their ``config.json``.

Speed depends on shapes and not on values, so the weights are random (`benchmarks.peers.weights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts in place of each layer's MLP: ``active`` of ``count`` a token, each of ``intermediate`` elements."""

    count: int
    active: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class DeltaMixers:
    """Gated delta rules in place of attention, except in each fourth layer, whose attention is gated (Qwen3.5).

    ``heads`` of keys and as many of values, each of ``head_dim`` elements; ``kernel`` inputs are convolved.
    """

    heads: int
    head_dim: int
    kernel: int = 4
    attention_interval: int = 4
    rotated: float = 0.25

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return (layer + 1) % self.attention_interval == 0


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family: sizes in elements, ``rope_scaling`` as Hugging Face writes it.

    ``qk_norm`` says whether query and key heads are normalized (Qwen3). All shapes tie the output matrix to the
    embedding.
    """

    name: str
    model_type: str
    architecture: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    rope_theta: float
    rms_eps: float
    qk_norm: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    experts: Experts | None = None
    mixers: DeltaMixers | None = None

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention, and so keys and values."""
        return self.mixers is None or self.mixers.attends(layer)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in 16 bits."""
        attending = sum(self.attends(layer) for layer in range(self.layers))
        return 4 * attending * self.kv_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``."""
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }
        if self.rope_scaling:
            config["rope_scaling"] = dict(self.rope_scaling)
        if self.experts:
            config |= {
                "num_experts": self.experts.count,
                "num_experts_per_tok": self.experts.active,
                "moe_intermediate_size": self.experts.intermediate,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if self.mixers:
            config |= {
                "linear_num_key_heads": self.mixers.heads,
                "linear_num_value_heads": self.mixers.heads,
                "linear_key_head_dim": self.mixers.head_dim,
                "linear_value_head_dim": self.mixers.head_dim,
                "linear_conv_kernel_dim": self.mixers.kernel,
                "layer_types": [
                    "full_attention" if self.attends(layer) else "linear_attention"
                    for layer in range(self.layers)
                ],
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": self.rope_theta,
                    "partial_rotary_factor": self.mixers.rotated,
                },
            }
        return config

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names of all tensors as in Hugging Face's checkpoints, and their shapes ([out, in] for matrices)."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            if self.mixers is None or self.mixers.attends(layer):
                yield from self._attention(f"{at}.self_attn")
            else:
                yield from self._delta_rule(f"{at}.linear_attn", self.mixers)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
            if self.experts is None:
                yield from self._mlp(f"{at}.mlp", self.intermediate)
                continue
            yield f"{at}.mlp.gate.weight", (self.experts.count, self.hidden)
            for expert in range(self.experts.count):
                yield from self._mlp(f"{at}.mlp.experts.{expert}", self.experts.intermediate)
        yield "model.norm.weight", (self.hidden,)

    def _attention(self, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield f"{at}.q_proj.weight", ((2 if self.mixers else 1) * queries, self.hidden)
        yield f"{at}.k_proj.weight", (keys, self.hidden)
        yield f"{at}.v_proj.weight", (keys, self.hidden)
        yield f"{at}.o_proj.weight", (self.hidden, queries)
        if self.qk_norm:
            yield f"{at}.q_norm.weight", (self.head_dim,)
            yield f"{at}.k_norm.weight", (self.head_dim,)

    def _delta_rule(self, at: str, mixers: DeltaMixers) -> Iterator[tuple[str, tuple[int, ...]]]:
        width = mixers.heads * mixers.head_dim
        yield f"{at}.in_proj_qkv.weight", (3 * width, self.hidden)
        yield f"{at}.in_proj_z.weight", (width, self.hidden)
        yield f"{at}.in_proj_a.weight", (mixers.heads, self.hidden)
        yield f"{at}.in_proj_b.weight", (mixers.heads, self.hidden)
        yield f"{at}.conv1d.weight", (3 * width, 1, mixers.kernel)
        yield f"{at}.A_log", (mixers.heads,)
        yield f"{at}.dt_bias", (mixers.heads,)
        yield f"{at}.norm.weight", (mixers.head_dim,)
        yield f"{at}.out_proj.weight", (self.hidden, width)

    def _mlp(self, at: str, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{at}.gate_proj.weight", (intermediate, self.hidden)
        yield f"{at}.up_proj.weight", (intermediate, self.hidden)
        yield f"{at}.down_proj.weight", (self.hidden, intermediate)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", "llama", "LlamaForCausalLM", 576, 1536, 30, 9, 3, 64, 49_152, 8192, 1e5, 1e-5),
        Shape(
            *("qwen3-0.6b", "qwen3", "Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151_936, 40_960, 1e6),
            rms_eps=1e-6,
            qk_norm=True,
        ),
        Shape(
            *("llama-3.2-1b", "llama", "LlamaForCausalLM", 2048, 8192, 16, 32, 8, 64, 128_256, 131_072, 5e5),
            rms_eps=1e-5,
            rope_scaling=_LLAMA3_ROPE,
        ),
        Shape(
            *(
                "qwen3.5-0.8b",
                "qwen3_5_text",
                "Qwen3_5ForCausalLM",
                1024,
                3584,
                24,
                8,
                2,
                256,
                248_320,
                262_144,
            ),
            rope_theta=1e7,
            rms_eps=1e-6,
            qk_norm=True,
            mixers=DeltaMixers(heads=16, head_dim=128),
        ),
        Shape(
            *(
                "qwen3-30b-a3b-3l",
                "qwen3_moe",
                "Qwen3MoeForCausalLM",
                2048,
                6144,
                3,
                32,
                4,
                128,
                9_536,
                40_960,
            ),
            rope_theta=1e6,
            rms_eps=1e-6,
            qk_norm=True,
            experts=Experts(count=128, active=8, intermediate=768),
        ),
    )
}
"""By name; ``qwen3-30b-a3b-3l`` has 3 of the 48 layers, so that 8 GB of memory hold two contenders in bfloat16, and a
vocabulary whose matrix is as large beside them as that of the whole model is beside 48."""

PACKAGED: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("builtin-target", "llama", "LlamaForCausalLM", 256, 768, 3, 4, 2, 64, 4096, 8192, 1e4, 1e-5),
        Shape("builtin-draft", "llama", "LlamaForCausalLM", 128, 384, 2, 4, 2, 32, 4096, 8192, 1e4, 1e-5),
    )
}
"""The built-in model and its draft model, whose weights are real: what is drafted needs real text."""

CONSTANT = 2**-5
"""Constant value of one added dimension of a widened model's hidden state."""


def widened(own: Shape, size: Shape, suffix: str = "") -> Shape:
    """The sizes of ``size`` for weights of ``own`` that are filled up (`benchmarks.drafts.widened`).

    Heads keep their size and rotation. RMSNorm divides by the mean over more dimensions, and one of them is `CONSTANT`
    and not 0: both are made up for in its epsilon, and in its weights.
    """
    epsilon = (own.hidden * own.rms_eps - CONSTANT**2) / size.hidden
    return replace(
        size,
        name=f"widened-{size.name}{suffix}",
        positions=own.positions,
        rms_eps=epsilon,
        rope_theta=own.rope_theta,
        rope_scaling=None,
        head_dim=own.head_dim,
    )


_TARGET, _DRAFT = PACKAGED["builtin-target"], PACKAGED["builtin-draft"]
_HALF = replace(SHAPES["smollm2-135m"], hidden=288, intermediate=768, layers=8, head_dim=32)
_LARGER = replace(SHAPES["llama-3.2-1b"], hidden=1024, intermediate=4096, layers=4, head_dim=32)

WIDENED: Mapping[str, tuple[Shape, Shape]] = {
    "smollm2-135m": (widened(_TARGET, SHAPES["smollm2-135m"]), widened(_DRAFT, _HALF, "-draft")),
    "llama-3.2-1b": (widened(_TARGET, SHAPES["llama-3.2-1b"]), widened(_DRAFT, _LARGER, "-draft")),
}
"""The built-in model at published sizes, and its draft model at half the width and a quarter of the layers: 134.5 and
21.2 million parameters, and for a GPU 1,236 and 192.
"""

EVERY: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (*SHAPES.values(), *PACKAGED.values(), *(each for pair in WIDENED.values() for each in pair))
}
