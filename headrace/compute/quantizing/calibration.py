"""Reads texts with a decoder, one at a time, without an engine: to calibrate a quantized model, and to judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import Kernels
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.layout import linear_places
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights
from headrace.compute.quantization.weight import QuantizedWeight

_BLOCK = 16


class Reader:
    """Reads texts of up to ``max_tokens`` tokens and returns logits.

    Args:
        spec: the model.
        weights: its weights, whose layers are moved out of it.
        kernels: the backend.
        max_tokens: length of the longest text.
        kv_dtype: dtype of the KV pages; None: that of the weights.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        max_tokens: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._decoder = Decoder(spec, weights, kernels, max_tokens)
        self._blocks = -(-max_tokens // _BLOCK)
        dtype = kv_dtype or self._decoder.dtype
        self._kv = PagedKV(spec.shape, self._blocks, _BLOCK, dtype, self._decoder.device)

    def logits(self, tokens: Sequence[int], wanted: int) -> Tensor:
        """Float32 logits [wanted, vocab] after each of the last ``wanted`` of the tokens."""
        count, device = len(tokens), self._decoder.device
        places = torch.arange(count, device=device)
        batch = Batch(
            tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
            positions=places,
            slot_mapping=places,
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([count], dtype=torch.int32, device=device),
            block_tables=torch.arange(self._blocks, dtype=torch.int32, device=device)[None],
            logits_indices=places[count - wanted :],
            lengths=(count,),
            contexts=(count,),
            decode_rows=int(count == 1),
            block_size=_BLOCK,
        )
        return self._decoder.forward(batch, self._kv)


# Calibration: second moments of the inputs of linear layers, summed while a model reads a text.

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

    def prepare_linear(self, weight: Tensor | QuantizedWeight, *, consume: bool = False) -> Any:
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


# Quality of a quantized model: compared with the plain model on a text.
#
# Perplexity measures the loss in predicting the text. Divergence measures the distance of the two distributions,
# whatever token comes next. Agreement measures how often greedy decoding would choose the same token.

MOST_PERPLEXITY = 0.05
"""Bound: the perplexity may grow by this share."""
MOST_DIVERGENCE = 0.1
"""Bound: the mean divergence, in nats a token."""


class Quality(NamedTuple):
    """The quality of one model relative to another, over the same tokens.

    ``divergence`` is the mean of KL(plain ‖ other) in nats. ``agreement`` is the share of tokens at which both have
    the same likeliest token.
    """

    plain_perplexity: float
    perplexity: float
    divergence: float
    agreement: float
    tokens: int

    @property
    def growth(self) -> float:
        """Growth of the perplexity, as a share of the plain model's."""
        return self.perplexity / self.plain_perplexity - 1

    def faults(self) -> list[str]:
        """The bounds that it exceeds."""
        found = []
        if not self.growth <= MOST_PERPLEXITY:
            found.append(f"perplexity grew by {self.growth:.1%}, more than {MOST_PERPLEXITY:.0%}")
        if not self.divergence <= MOST_DIVERGENCE:
            found.append(f"divergence is {self.divergence:.3f} nats a token, more than {MOST_DIVERGENCE}")
        return found


def compare(plain: Reader, other: Reader, windows: Iterable[Sequence[int]]) -> Quality:
    """Let both models read every window separately, and compare them."""
    loss = other_loss = divergence = 0.0
    agreed = count = 0
    for tokens in windows:
        truth = torch.tensor(tokens[1:])
        a, b = (each.logits(tokens, len(tokens)).cpu()[:-1].log_softmax(-1) for each in (plain, other))
        loss += float(F.nll_loss(a, truth, reduction="sum"))
        other_loss += float(F.nll_loss(b, truth, reduction="sum"))
        divergence += float(F.kl_div(b, a, log_target=True, reduction="sum"))
        agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
        count += len(truth)
    return Quality(
        math.exp(loss / count), math.exp(other_loss / count), divergence / count, agreed / count, count
    )
