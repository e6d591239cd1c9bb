"""Calibration: second moments of the inputs of linear layers, summed while a model reads a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.layout import linear_places
from headrace.compute.model.reading import Reader
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights
from headrace.compute.quantization.weight import QuantizedWeight

LINEARS = ("qkv", "output", "gate_up", "down")
"""The linear layers of a layer, in the order in which a decoder prepares and computes them."""

_MOMENTS_BYTES = 4 << 30
"""Limit of moments in memory at once."""

Moments = dict[tuple[int, str], Tensor]
"""By layer and linear layer: float32 [in, in], the sum over tokens of ``x xᵀ``."""


class _Enough(Exception):
    """All observed layers have run; this is not an error."""


class WatchingKernels(TorchKernels):
    """Kernels that compute as the torch kernels, and sum the moments of the inputs of some ``layers``.

    They stop after the last of these, because the layers after it and the head are not needed.
    """

    name = "watching"

    def __init__(self, layers: Collection[int]) -> None:
        super().__init__()
        self.moments: Moments = {}
        self._layers = layers
        self._last = max(layers), LINEARS[-1]
        self._prepared = 0

    def prepare_linear(self, weight: Tensor | QuantizedWeight) -> Any:
        layer, which = divmod(self._prepared, len(LINEARS))
        self._prepared += 1
        return (layer, LINEARS[which]), super().prepare_linear(weight)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        place, prepared = weight
        if place[0] in self._layers:
            wide = x.float()
            moments = wide.T @ wide
            self.moments[place] = self.moments[place].add_(moments) if place in self.moments else moments
        if place == self._last:
            raise _Enough
        return super().linear(x, prepared, bias)


def input_moments(
    spec: DecoderSpec, weights: DecoderWeights, windows: Iterable[Sequence[int]], layers: Collection[int]
) -> Moments:
    """The moments of the linear layers of ``layers`` over windows of tokens, each read separately; uses up the
    weights.
    """
    kernels = WatchingKernels(layers)
    every = list(windows)
    reader = Reader(spec, weights, kernels, max(map(len, every)))
    for tokens in every:
        with suppress(_Enough):  # all wanted: the model's last layer computes only wanted positions
            reader.logits(tokens, wanted=len(tokens))
    return {place: moments.cpu() for place, moments in kernels.moments.items()}


def split_windows(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """Split a text into windows of ``length`` tokens; the rest at its end is dropped."""
    return [tokens[begin : begin + length] for begin in range(0, len(tokens) - length + 1, length)]


class Calibration:
    """The moments of every layer on one text, computed for as many layers at a time as fit in memory.

    Args:
        spec: the model.
        load: loads its weights again, for each reading of the text.
        windows: the text, in tokens.
    """

    def __init__(
        self, spec: DecoderSpec, load: Callable[[], DecoderWeights], windows: Sequence[Sequence[int]]
    ) -> None:
        self._spec, self._load, self._windows = spec, load, windows
        widths = [place.inputs for place in linear_places(spec, 0).values()]
        self._at_once = max(1, _MOMENTS_BYTES // sum(4 * width * width for width in widths))
        self._held: Moments = {}

    def of(self, layer: int) -> dict[str, Tensor]:
        """The moments of a layer's linear layers; layers should be requested in order."""
        if (layer, LINEARS[0]) not in self._held:
            wanted = range(layer, min(layer + self._at_once, self._spec.num_layers))
            self._held = {}  # freed before the next are computed
            self._held = input_moments(self._spec, self._load(), self._windows, wanted)
        return {linear: self._held[layer, linear] for linear in LINEARS}
