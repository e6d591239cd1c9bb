"""Rotary tables: the plain one by definition, and what the schemes that switch by length do with the longest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from headrace.compute.model.rope import rope_table
from headrace.compute.model.spec import RopeSpec

PLAIN = RopeSpec(theta=100.0, rotary_dim=8, original_positions=16)


def test_plain_by_definition() -> None:
    table = rope_table(PLAIN, 5000)  # computed in several parts
    assert table.shape == (5000, 2, 8)
    for position in (0, 1, 11, 2047, 2048, 4999):
        within = 1e-6 * max(1, position)  # angles are float32
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            assert table[position, 0, pair].item() == pytest.approx(math.cos(angle), abs=within)
            assert table[position, 0, pair + 4].item() == pytest.approx(math.cos(angle), abs=within)
            assert table[position, 1, pair].item() == pytest.approx(-math.sin(angle), abs=within)
            assert table[position, 1, pair + 4].item() == pytest.approx(math.sin(angle), abs=within)


@pytest.mark.parametrize(
    "rope",
    [
        replace(PLAIN, kind="dynamic", factor=4.0),
        replace(PLAIN, kind="longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4),
    ],
)
def test_schemes_that_switch_by_length_are_plain_up_to_the_trained_length(rope: RopeSpec) -> None:
    torch.testing.assert_close(rope_table(rope, 16), rope_table(PLAIN, 16))
    assert not torch.allclose(rope_table(rope, 17)[:16], rope_table(PLAIN, 16))


def test_linear_is_plain_at_a_fraction_of_the_position() -> None:
    stretched = rope_table(replace(PLAIN, kind="linear", factor=4.0), 16)
    torch.testing.assert_close(stretched[::4], rope_table(PLAIN, 4))


def test_attention_factor_scales_both() -> None:
    rope = replace(PLAIN, kind="yarn", factor=1.0, attention_factor=1.5)
    torch.testing.assert_close(rope_table(rope, 8), rope_table(PLAIN, 8) * 1.5)
