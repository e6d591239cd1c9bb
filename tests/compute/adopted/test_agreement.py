"""The check at start finds decoders that read what they must not, and passes those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.compute.adopted.agreement import (
    LONG,
    SHORT,
    TOLERANCE,
    Rows,
    check_agreement,
    chunked_logits,
    first_step,
    sample_rows,
)
from headrace.compute.batch import Batch
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import HeadShape
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.shape import LayerShape, ModelShape

VOCAB = 50
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


class Averaging:
    """A decoder whose logits are the mean over all tokens of a sequence so far, which it keeps in its pages.

    ``fault`` is what it does wrong.
    """

    device = torch.device("cpu")
    states = None

    def __init__(self, fault: str = "", dtype: torch.dtype = torch.float32) -> None:
        self.fault, self.dtype = fault, dtype
        layer = LayerShape(HeadShape(1, 1, VOCAB))
        sizes = {"vocab_size": VOCAB, "hidden_size": VOCAB, "intermediate_size": VOCAB, "position_bytes": 0}
        counts = dict.fromkeys(("max_positions", "reach", "num_parameters", "token_parameters"), 1000)
        self.shape = ModelShape(
            "Averaging", layers=(layer,), tied_embeddings=False, dtype="float32", **sizes, **counts
        )

    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        (pages,) = kv.layers
        keys = pages.keys.flatten(0, 1)[:, 0]
        given = TABLE[batch.tokens.long()].to(self.dtype)
        keys[batch.slot_mapping] = given
        out, at = [], 0
        for row, (length, end) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
            table = batch.block_tables[row if self.fault != "first table" else 0]
            places = (table[:, None] * kv.block_size + torch.arange(kv.block_size)).flatten()[:end]
            seen = given[at : at + length] if self.fault == "no pages" else keys[places]
            sums = seen.float().cumsum(0)[-length:]
            counts = batch.positions[at : at + length] + 1
            out.append((sums / counts[:, None]).to(self.dtype))
            at += length
        return torch.cat(out)[batch.logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, :-1] if self.fault == "narrow" else hidden


def expected(tokens: tuple[Tensor, Tensor]) -> Rows:
    counts = torch.arange(1, LONG + 1)[:, None]
    one, other = (TABLE[row].cumsum(0) / counts[: len(row)] for row in tokens)
    return Rows(tokens, (one, other))


@pytest.mark.parametrize("longest", [128, 20, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_reads_its_pages_agrees(dtype: torch.dtype, longest: int) -> None:
    decoder: Any = Averaging(dtype=dtype)
    check_agreement(decoder, expected(sample_rows(VOCAB, longest, ())))


@pytest.mark.parametrize("fault", ["no pages", "first table"])
def test_one_that_reads_others_or_nothing_is_refused(fault: str) -> None:
    decoder: Any = Averaging(fault)
    with pytest.raises(ModelError, match="of their spread when prompts are computed in chunks"):
        check_agreement(decoder, expected(sample_rows(VOCAB, 128, ())))


def test_logits_of_another_shape_are_refused() -> None:
    decoder: Any = Averaging("narrow")
    with pytest.raises(ModelError, match=r"its logits have shape \[40, 49\] instead of \[40, 50\]"):
        check_agreement(decoder, expected(sample_rows(VOCAB, 128, ())))


def test_numbers_that_are_none_are_refused() -> None:
    decoder: Any = Averaging()
    rows = expected(sample_rows(VOCAB, 128, ()))
    rows.logits[0][3, 4] = float("nan")
    with pytest.raises(ModelError, match="differ"):
        check_agreement(decoder, rows)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_the_bound_is_a_part_of_the_spread(times: float) -> None:
    decoder: Any = Averaging()
    rows = expected(sample_rows(VOCAB, 128, ()))
    far = times * TOLERANCE[torch.float32] * float(rows.logits[0].std())
    rows.logits[0][7, 7] += far
    if times < 1:
        check_agreement(decoder, rows)
    else:
        with pytest.raises(ModelError, match="differ"):
            check_agreement(decoder, rows)


def test_rows_are_the_same_each_time_and_without_tokens_of_images() -> None:
    rows = sample_rows(VOCAB, 128, (3, 4, 5))
    assert [len(row) for row in rows] == [LONG, SHORT]
    assert not {3, 4, 5} & {*torch.cat(rows).tolist()}
    assert all(
        torch.equal(one, other) for one, other in zip(rows, sample_rows(VOCAB, 128, (3, 4, 5)), strict=True)
    )


def test_every_token_of_both_rows_is_computed_once() -> None:
    decoder: Any = Averaging()
    rows = sample_rows(VOCAB, 128, ())
    assert [len(each) for each in chunked_logits(decoder, rows)] == [LONG, SHORT]


def test_the_first_step_reaches_the_last_position() -> None:
    decoder: Any = Averaging()
    batch, _ = first_step(sample_rows(VOCAB, 128, ()), decoder, 128)
    assert batch.positions[:LONG].tolist() == list(range(LONG))
    assert batch.positions[LONG:].tolist() == list(range(128 - SHORT, 128))
