"""What a model costs against another, where both are known by heart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from headrace.compute.model.reading import Reader
from headrace.compute.quantization.quality import Quality, compare


class Parrot:
    """Gives token 0 the same odds everywhere, and shares the rest among two others."""

    def __init__(self, odds: float) -> None:
        self._row = torch.tensor([odds, (1 - odds) / 2, (1 - odds) / 2]).log()

    def logits(self, tokens: Sequence[int], wanted: int) -> Tensor:
        return self._row.expand(wanted, 3) + 7.0  # logits are known up to a constant


def compared(plain: float, other: float, *windows: list[int]) -> Quality:
    return compare(cast(Reader, Parrot(plain)), cast(Reader, Parrot(other)), windows)


def test_a_model_is_as_good_as_itself() -> None:
    quality = compared(0.5, 0.5, [0, 0, 1], [1, 2])
    assert quality.tokens == 3
    assert quality.plain_perplexity == pytest.approx((0.5 * 0.25 * 0.25) ** (-1 / 3))
    assert quality.growth == pytest.approx(0)
    assert quality.divergence == pytest.approx(0, abs=1e-6)
    assert quality.agreement == 1
    assert not quality.faults()


def test_numbers_are_those_of_the_definitions() -> None:
    quality = compared(0.5, 0.2, [1, 0, 0, 0])
    assert quality.perplexity == pytest.approx(5)
    assert quality.growth == pytest.approx(1.5)
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.25 / 0.4)
    assert quality.divergence == pytest.approx(expected, rel=1e-4)
    assert quality.agreement == 0
    assert quality.faults() == [
        "perplexity grew by 150.0%, more than 5%",
        f"divergence is {expected:.3f} nats a token, more than 0.1",
    ]


def test_what_is_not_a_number_is_not_good() -> None:
    assert len(Quality(2.0, math.nan, math.nan, 0.0, 9).faults()) == 2
