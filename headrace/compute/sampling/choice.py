"""Sampling one token per row: temperature, min-p, top-k, top-p, then the draw. The definition of `Kernels.choose`, in
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.sampling import filters
from headrace.compute.sampling.draw import draw, or_fault
from headrace.compute.transfer import upload

Reals = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Choice(NamedTuple):
    """How a token is sampled from each of S rows; arrays [S] on the host.

    ``temperature`` > 0 divides the logits. First, tokens less likely than ``min_p`` times the likeliest are removed
    (0: none). Then only the ``top_k`` likeliest stay (outside 1..V-1: all). Of those, only the fewest that hold
    ``top_p`` of their mass stay (1 and more: all). ``uniform`` in [0, 1) selects the token.
    """

    temperature: Reals
    min_p: Reals
    top_k: Ints
    top_p: Reals
    uniform: Reals


def choose(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """A token int64 [S] sampled from each row of ``logits`` [S, V], or a fault as in `draw.or_fault`."""
    wide = logits.float()
    (uniform,) = upload(logits.device, choice.uniform)
    return or_fault(draw(probabilities(wide, choice), uniform), wide.amax(-1))


def probabilities(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """The probabilities with which the tokens of ``logits`` float32 [S, V] are sampled; NaN in rows that give a
    fault.
    """
    device, vocab = logits.device, logits.shape[1]
    (temperature,) = upload(device, choice.temperature)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature.to(logits.dtype).unsqueeze(1))
    if (rows := np.flatnonzero(choice.min_p > 0)).size:
        (share,) = upload(device, choice.min_p[rows])
        _on_rows(scaled, rows, lambda part: filters.min_p(part, share.to(part.dtype)))
    masses = np.where(choice.top_p < 1, choice.top_p, np.inf)
    counted = (choice.top_k > 0) & (choice.top_k < vocab)
    if (rows := np.flatnonzero(counted)).size:
        counts = choice.top_k[rows]
        k, mass = upload(device, counts, masses[rows])
        largest = int(counts.max())
        _on_rows(scaled, rows, lambda part: filters.top_k(part, k, mass, largest))
    if (rows := np.flatnonzero(~counted & (choice.top_p < 1))).size:
        (mass,) = upload(device, masses[rows])
        _on_rows(scaled, rows, lambda part: filters.top_p(part, mass))
    return scaled.softmax(-1)


def _on_rows(logits: torch.Tensor, rows: Ints, change: Callable[[torch.Tensor], None]) -> None:
    """Apply ``change`` in place to some rows of ``logits``."""
    if rows.size == len(logits):
        change(logits)
        return
    (at,) = upload(logits.device, rows)
    part = logits.index_select(0, at)
    change(part)
    logits.index_copy_(0, at, part)
