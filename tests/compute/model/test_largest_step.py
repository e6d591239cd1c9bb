"""The largest step that is run to measure its memory."""

from __future__ import annotations

import pytest
import torch

from headrace.compute.batch import Batch
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.largest_step import largest_step_bytes, row_lengths
from tests.parity.drafted_runs import decoder


@pytest.mark.parametrize(
    ("rows", "tokens", "longest", "lengths"),
    [
        (1, 40, 96, (40,)),
        (3, 40, 96, (1, 1, 38)),
        (3, 40, 16, (8, 16, 16)),
        (3, 60, 16, (16, 16, 16)),
        (8, 4, 96, (1, 1, 1, 1)),
    ],
)
def test_rows_have_as_many_tokens_as_the_step(
    rows: int, tokens: int, longest: int, lengths: tuple[int, ...]
) -> None:
    assert row_lengths(rows, tokens, longest) == lengths


def test_the_step_is_as_large_as_the_limits_and_measured_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    class Meter:
        def begin(self) -> None:
            seen.append("begin")

        def end(self) -> int:
            seen.append("end")
            return 12345

    hidden = Decoder.hidden

    def noted(model: Decoder, batch: Batch, kv: PagedKV) -> torch.Tensor:
        seen.append((batch.lengths, batch.decode_rows, kv.num_blocks))
        return hidden(model, batch, kv)

    monkeypatch.setattr(Decoder, "hidden", noted)
    most = largest_step_bytes(
        decoder(),
        Meter(),
        block_size=16,
        kv_dtype=torch.float32,
        max_model_len=96,
        max_num_seqs=3,
        max_num_batched_tokens=50,
    )
    assert most == 12345
    assert seen == ["begin", ((1, 1, 48), 2, 1), "end"]
