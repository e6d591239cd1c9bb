"""Masks of transformers' models are read from their predicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.compute.adopted.attention import Mask, window_of
from headrace.compute.checkpoint import ModelError

LONGEST = 300


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def window(size: int) -> Any:
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunk(size: int) -> Any:
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (causal, None),
        (window(1), 1),
        (window(16), 16),
        (window(299), 299),
        (window(LONGEST), None),
        (chunk(512), None),
    ],
)
def test_causal_masks_and_windows(predicate: Any, expected: int | None) -> None:
    assert window_of(Mask(predicate), LONGEST) == expected


@pytest.mark.parametrize(
    "predicate",
    [
        lambda batch, head, query, key: key >= 0,  # both directions
        lambda batch, head, query, key: (key <= query) | (key < 10),  # a prefix that sees itself
        lambda batch, head, query, key: (key <= query) & ((key > query - 8) | (key < 4)),  # sinks
        lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0),  # dilated
        lambda batch, head, query, key: key < query,  # not itself
        lambda batch, head, query, key: (
            torch.zeros(40, dtype=torch.bool)[key] | (key <= query)
        ),  # of one length only
        lambda batch, head, query, key: (key <= query) & (torch.where(query < 200, query, 16) > query - key),
    ],
)
def test_other_masks_are_refused(predicate: Any) -> None:
    with pytest.raises(ModelError, match="mask"):
        window_of(Mask(predicate), LONGEST)


@pytest.mark.parametrize("size", [2, 16, 299])
def test_chunks_are_refused_with_the_length_that_is_served(size: int) -> None:
    with pytest.raises(
        ModelError, match=rf"chunks of {size} tokens; it is served with --max-model-len {size} or less"
    ):
        window_of(Mask(chunk(size)), LONGEST)
    assert window_of(Mask(chunk(size)), size) is None


def test_a_tensor_as_a_mask_is_refused() -> None:
    with pytest.raises(ModelError, match="a mask of its own"):
        window_of(torch.zeros(1), LONGEST)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask[:, :, :3],
        lambda mask: torch.zeros(3) + mask,
        lambda mask: mask & torch.ones(3, dtype=torch.bool),
        lambda mask: mask.dtype,
    ],
)
def test_masks_that_a_model_changes_itself_are_refused(use: Any) -> None:
    with pytest.raises(ModelError, match=r"code of its own|selects elements of its masks"):
        use(Mask(causal))
