"""Pooling against sums written out by hand, and attention over packed rows against each row alone."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.compute.encoder.models import pool
from headrace.compute.encoder.networks import attend, pack
from headrace.core.embedding import TokenRow

CPU = torch.device("cpu")
ROWS = [TokenRow((7,)), TokenRow((1, 2)), TokenRow((3, 4)), TokenRow((5, 6, 8))]
HIDDEN = torch.arange(16.0).view(8, 2) ** 2


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("cls", [[0, 1], [4, 9], [36, 49], [100, 121]]),
        ("last", [[0, 1], [16, 25], [64, 81], [196, 225]]),
        (
            "mean",
            [
                [0, 1],
                [(4 + 16) / 2, (9 + 25) / 2],
                [(36 + 64) / 2, (49 + 81) / 2],
                [(100 + 144 + 196) / 3, (121 + 169 + 225) / 3],
            ],
        ),
    ],
)
def test_pooling(mode: str, expected: list[list[float]]) -> None:
    torch.testing.assert_close(
        pool(mode, HIDDEN, pack(ROWS, CPU)), torch.tensor(expected, dtype=torch.float32)
    )


def test_packed_rows() -> None:
    packed = pack([TokenRow((9,)), TokenRow((1, 2, 3), second=2)], CPU)
    assert packed.tokens.tolist() == [9, 1, 2, 3]
    assert packed.positions.tolist() == [0, 0, 1, 2]
    assert packed.second.tolist() == [0, 0, 0, 1]
    assert packed.starts == [0, 1]


def by_hand(qkv: torch.Tensor, reach: int | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Attention of one row, one query at a time."""
    length, _, heads, size = qkv.shape
    out = torch.zeros(length, heads, size)
    for head in range(heads):
        for query in range(length):
            keys = [key for key in range(length) if reach is None or abs(key - query) <= reach]
            scores = torch.tensor(
                [
                    float(qkv[query, 0, head] @ qkv[key, 1, head]) / math.sqrt(size)
                    + (0.0 if bias is None else float(bias[head, query, key]))
                    for key in keys
                ]
            )
            for weight, key in zip(scores.softmax(0), keys, strict=True):
                out[query, head] += weight * qkv[key, 2, head]
    return out.view(length, -1)


@pytest.mark.parametrize("reach", [None, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_sees_its_own_row_only(
    reach: int | None, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reach is not None and biased:
        return  # no family has both
    monkeypatch.setattr("headrace.compute.encoder.networks._QUERIES", 4)
    torch.manual_seed(1)
    lengths = (2, 5, 5, 11)
    packed = pack([TokenRow(tuple(range(length))) for length in lengths], CPU)
    qkv = torch.randn(sum(lengths), 3, 2, 4)
    bias = torch.randn(2, 11, 11) if biased else None
    start, expected = 0, []
    for length in lengths:
        expected.append(by_hand(qkv[start : start + length], reach, bias))
        start += length
    torch.testing.assert_close(attend(qkv, packed.groups, bias, reach), torch.cat(expected))
