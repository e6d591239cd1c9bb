"""Groups of window layers: how layers share blocks of one size, when those with a window keep only its last tokens.

```
 layers   w w w w w F w w w w w F w w            F: full, two of them; w: with a window, twelve
 group 0  F F     group 1  w w     …     group 6  w w
```
Each group has its own block table, and as many layers as are full, so that a block of any group takes the same memory.
The blocks of a pool belong to whatever group needs one. `core.memory.window_blocks` says which those are.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.compute.model.shape import ModelShape
from headrace.core.capacity import WindowGroups, most_blocks

LEAST_GAIN = 1.25
"""Groups are used if a sequence of maximum length takes at least so many times less memory."""


class LayerGroups(NamedTuple):
    """Each layer's group (0: full), its place in a block of ``size`` layers, and ``windows`` as the core knows them.

    A layer that shares keys and values has those of the layer that it shares.
    """

    group: tuple[int, ...]
    place: tuple[int, ...]
    size: int
    windows: WindowGroups


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
    if len({layer.heads._replace(heads=0) for _, layer in own}) > 1 or any(layer.latent for _, layer in own):
        return "layers with and without a window keep keys of different shapes"
    placed = {index: (0, place) for place, index in enumerate(full)}
    size = len(full)
    limited = [index for index, layer in own if layer.window is not None]
    placed |= {index: (1 + at // size, at % size) for at, index in enumerate(limited)}
    for index, layer in enumerate(shape.layers):
        if layer.shares is not None:
            placed[index] = placed[layer.shares]
    groups, places = zip(*(placed[index] for index in range(len(shape.layers))), strict=True)
    return LayerGroups(groups, places, size, WindowGroups(-(-len(limited) // size), seen.pop(), chunk))


def gain(groups: LayerGroups, shape: ModelShape, max_model_len: int, block_size: int) -> float:
    """How many times less memory a sequence of maximum length takes than without groups."""
    own = sum(layer.shares is None for layer in shape.layers)
    before = own * most_blocks(max_model_len, block_size)
    return before / (groups.size * most_blocks(max_model_len, block_size, groups.windows))
