"""Shapes of models as plain numbers, and the bytes that follow from them.

The built-in shapes are copied from the models' ``config.json``. Only dense decoders are supported, and only biases of
queries, keys and values. `roofline` combines a shape with a device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder; widths in elements. ``post_norms``: Gemma's two additional norms in each layer."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False

    @property
    def linear_parameters(self) -> int:
        """Number of weights in the layers' matrices, without embedding and LM head."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * heads
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def table_parameters(self) -> int:
        """Number of weights in the input embedding, and in the LM head (the same table if tied)."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        norms = (4 if self.post_norms else 2) * self.hidden_size + 2 * self.head_dim * self.qk_norm
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        tables = self.table_parameters * (1 if self.tied_embeddings else 2)
        return self.linear_parameters + self.num_layers * (norms + biases) + self.hidden_size + tables

    def kv_bytes_per_token(self, element_bytes: float = 2.0) -> int:
        """Bytes of the KV cache per token, all layers; a sliding window is not taken into account."""
        return round(2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes)


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, tied_embeddings=True),
        ModelShape("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128_256, tied_embeddings=True),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064, qkv_bias=True),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936, tied_embeddings=True, qk_norm=True),
        ModelShape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151_936, tied_embeddings=True, qk_norm=True),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936, qk_norm=True),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25_600, 151_936, qk_norm=True),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152, tied_embeddings=True),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14_336, 32_768),
        ModelShape("phi-3-mini", 32, 3072, 32, 32, 96, 8192, 32_064),
        ModelShape("gemma-2-9b", 42, 3584, 16, 8, 256, 14_336, 256_000, tied_embeddings=True, post_norms=True),
        ModelShape(
            "gemma-3-1b", 26, 1152, 4, 1, 256, 6912, 262_144,
            tied_embeddings=True, qk_norm=True, post_norms=True,
        ),
    )
}  # fmt: skip
"""Built-in models by name; planning with them needs no download."""
