"""The shape of a model: what memory plan, KV cache, cost and reports need to know of it, however it is computed.

A recipe yields it: that of a native family is `spec.DecoderSpec`.

Layers share blocks of one size, also when those with a window keep only its last tokens:

```
 layers   w w w w w F w w w w w F w w            F: full, two of them; w: with a window, twelve
 group 0  F F     group 1  w w     …     group 6  w w
```
Each group has its own block table, and as many layers as are full, so that a block of any group takes the same memory.
Where layers with a window keep more or less of a token than full ones (Gemma 4), a group has so many of them as take at
most the memory of all full layers, at least one. The blocks of a pool belong to whatever group needs one.
`core.memory.window_blocks` says which those are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace.compute.kernels import HeadShape
from headrace.core.capacity import SparseLayers, WindowGroups, most_blocks


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


LEAST_GAIN = 1.25
"""Groups are used if a sequence of maximum length takes at least so many times less memory."""


class LayerGroups(NamedTuple):
    """Each layer's group (0: full), its place in a block, and ``windows`` as the core knows them.

    A block has the keys and values of ``full`` layers, or of at most ``limited`` ones with a window; their shapes are
    those of the layers of these numbers: ``first_full`` and ``first_limited``. A layer that shares keys and values has
    those of the layer that it shares.
    """

    group: tuple[int, ...]
    place: tuple[int, ...]
    full: int
    limited: int
    first_full: int
    first_limited: int
    windows: WindowGroups

    def block_elements(self, shape: ModelShape) -> int:
        """Elements of a token in a block."""
        full, limited = shape.layers[self.first_full], shape.layers[self.first_limited]
        return max(self.full * full.kv_elements, self.limited * limited.kv_elements)


def layer_groups(shape: ModelShape, chunk: int) -> LayerGroups | str:
    """Groups for the layers of a model whose rows have at most ``chunk`` tokens, or why it has none."""
    own = [(index, layer) for index, layer in enumerate(shape.layers) if layer.shares is None]
    seen = {layer.window for _, layer in own if layer.window is not None}
    if not seen:
        return "no layer has a window"
    full = [index for index, layer in own if layer.window is None]
    if not full:
        return "all layers have a window"
    if len(seen) > 1:
        return "layers have different windows"
    if shape.state_bytes:
        return "the model has recurrent states"
    kept = {(layer.window is None, layer.heads._replace(heads=0)) for _, layer in own}
    if len(kept) > 2 or any(layer.latent for _, layer in own):
        return "layers of one kind keep keys of different shapes"
    limited = [index for index, layer in own if layer.window is not None]
    size = max(1, len(full) * shape.layers[full[0]].kv_elements // shape.layers[limited[0]].kv_elements)
    placed = {index: (0, place) for place, index in enumerate(full)}
    placed |= {index: (1 + at // size, at % size) for at, index in enumerate(limited)}
    for index, layer in enumerate(shape.layers):
        if layer.shares is not None:
            placed[index] = placed[layer.shares]
    groups, places = zip(*(placed[index] for index in range(len(shape.layers))), strict=True)
    windows = WindowGroups(-(-len(limited) // size), seen.pop(), chunk)
    return LayerGroups(groups, places, len(full), min(size, len(limited)), full[0], limited[0], windows)


def gain(groups: LayerGroups, shape: ModelShape, max_model_len: int, block_size: int) -> float:
    """How many times less memory a sequence of maximum length takes than without groups."""
    before = shape.kv_elements * most_blocks(max_model_len, block_size)
    return before / (groups.block_elements(shape) * most_blocks(max_model_len, block_size, groups.windows))
