"""A counter-based random generator: the number at a position is a pure function of (seed, position).

No state is carried from step to step. So neighbours, batch order, chunking and preemption cannot change a request's
tokens, and a preempted request samples the same tokens again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
Unsigned = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def _mix(words: Unsigned) -> Unsigned:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def uniforms(
    seeds: Unsigned, positions: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """One number in [0, 1) per pair, multiples of 2**-52.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), entered at ``position`` of
    the stream of the mixed seed. Mixing the seed first keeps neighbouring seeds from giving shifted copies of one
    stream.
    """
    words = _mix(_mix(seeds + _GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (words >> np.uint64(12)).astype(np.float64) * 2.0**-52
