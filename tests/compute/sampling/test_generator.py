from __future__ import annotations

import numpy as np

from headrace.compute.sampling.sampler import uniforms

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def table(seeds: int, positions: int) -> np.ndarray:
    grid = np.meshgrid(np.arange(seeds, dtype=np.uint64), np.arange(positions), indexing="ij")
    return uniforms(grid[0].ravel(), grid[1].ravel()).reshape(seeds, positions)


def test_equals_the_definition_in_plain_integers() -> None:
    # mix(GAMMA) is the first output of SplitMix64 seeded with 0, as published.
    assert mix(GAMMA) == 0xE220A8397B1DCDAF
    for seed in (0, 1, 12345, MASK):
        for position in (0, 1, 77, 1 << 40):
            expected = mix((mix((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK) >> 12
            got = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))
            assert float(got[0]) == expected * 2.0**-52


def test_uniform_and_independent_along_both_axes() -> None:
    values = table(400, 400)
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 1600) ** 2 / 1600).sum() / 99 < 1.5
    for a, b in (
        (values[:, :-1], values[:, 1:]),
        (values[:-1], values[1:]),
        (values[:-1, 1:], values[1:, :-1]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    assert len(np.unique(values)) == values.size
