"""The shape of a model: what memory plan, KV cache, cost and reports need to know of it, however it is computed.

A recipe yields it: that of a native family is `spec.DecoderSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace.compute.kernels import HeadShape
from headrace.core.capacity import SparseLayers


class LayerShape(NamedTuple):
    """The attention of one layer: its heads, and keys that a token attends to, itself included (None: all).

    A layer that ``shares`` reads the keys and values of that earlier layer, by its index, and has none of its own.
    ``latent``: values are the first features of the keys, which are kept once.
    """

    heads: HeadShape
    window: int | None = None
    shares: int | None = None
    latent: bool = False

    @property
    def kv_elements(self) -> int:
        """Elements that it keeps of a token."""
        kinds = 0 if self.shares is not None else 1 if self.latent else 2
        return kinds * self.heads.kv_heads * self.heads.head_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, or of the part of it that a rank computes; widths in elements.

    ``layers`` are those with attention, in the order of their pages; ``recurrent_layers`` counts the others.
    ``intermediate_size`` is the widest inner product of a token. ``max_positions`` is the context of the config and
    ``reach`` the longest one that its rotations are stretched to; ``position_bytes`` is the memory of their tables per
    position. ``num_parameters`` counts the weights of matrices and norms; a token is multiplied with
    ``token_parameters`` of them, which are fewer if it takes some of many experts. ``dtype`` is the dtype of the stored
    weights. ``state_bytes`` are those of recurrent states, for each sequence that runs; such a model can compute no
    position twice. ``residual_scale``: the hidden states between layers are this many times those of the published
    model, which a draft head was trained on. ``sparse`` are the layers with experts, if it is known how many a token
    has. ``lookup_parameters`` are those of tables beside the embedding, of which a token reads one row.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerShape, ...]
    max_positions: int
    reach: int
    position_bytes: int
    num_parameters: int
    token_parameters: int
    tied_embeddings: bool
    dtype: str
    state_bytes: int = 0
    residual_scale: float = 1.0
    sparse: SparseLayers | None = None
    lookup_parameters: int = 0
    recurrent_layers: int = 0

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers) + self.recurrent_layers

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values of a token, over all layers."""
        return sum(layer.kv_elements for layer in self.layers)

    @property
    def heads(self) -> HeadShape:
        """The heads of the layer with the widest keys."""
        return max((layer.heads for layer in self.layers), key=lambda heads: heads.kv_heads * heads.head_dim)

    @property
    def attention_width(self) -> int:
        """Features of the queries of a token, over all layers."""
        return sum(layer.heads.heads * layer.heads.head_dim for layer in self.layers)
