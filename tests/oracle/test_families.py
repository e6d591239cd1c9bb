"""Every family computes what transformers computes, however the positions are cut into steps and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.oracle.families import CASES, LENGTH, VOCAB
from tests.oracle.harness import Rig, Sequence


@dataclass
class Oracle:
    model: PreTrainedModel
    folder: Path
    tokens: list[list[int]]
    logits: list[Tensor]
    grows: bool

    def rig(self, **options: int) -> Rig:
        return Rig(self.folder, max_model_len=LENGTH, **options)


@pytest.fixture(scope="module", params=CASES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = case.build(folder)
    tokens = torch.randint(1, VOCAB, (5, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = [model(row[None]).logits[0] for row in tokens]
    return Oracle(model, folder, tokens.tolist(), logits, case.grows)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_the_oracle_has_something_to_say(oracle: Oracle) -> None:
    assert oracle.logits[0].std() > 0.05
    assert len({int(row.argmax()) for row in oracle.logits[0]}) > 3


def test_whole(oracle: Oracle) -> None:
    close(oracle.rig().logits(Sequence(oracle.tokens[0]), [LENGTH]), oracle.logits[0])


@pytest.mark.parametrize("chunks", [[1], [7], [13, 2, 1, 3]], ids=str)
def test_chunked(oracle: Oracle, chunks: list[int]) -> None:
    close(oracle.rig(block_size=8).logits(Sequence(oracle.tokens[0]), chunks), oracle.logits[0])


def test_batched_among_rows_of_mixed_length(oracle: Oracle) -> None:
    rig = oracle.rig(seed=3)
    sequences = [Sequence(tokens) for tokens in oracle.tokens]
    strides = [1, 4, 1, 9, 2]
    rig.step([(sequences[2], 27)])
    while rows := [
        (s, min(stride, LENGTH - s.computed))
        for s, stride in zip(sequences, strides, strict=True)
        if s.computed < LENGTH
    ]:
        ordered = sorted(rows, key=lambda row: row[1] != 1)
        before = [s.computed for s, _ in ordered]
        for (s, length), start, logits in zip(ordered, before, rig.step(rows), strict=True):
            close(logits, oracle.logits[sequences.index(s)][start : start + length])


def test_shared_prefix_and_recomputing_after_preemption(oracle: Oracle) -> None:
    rig = oracle.rig()
    first = Sequence(oracle.tokens[0])
    rig.logits(first, [16])
    sharing = Sequence(oracle.tokens[0], blocks=first.blocks[:5], computed=20)
    close(rig.logits(sharing, [11]), oracle.logits[0][20:])
    again = Sequence(oracle.tokens[0])
    close(rig.logits(again, [LENGTH]), oracle.logits[0])


def test_greedy_text(oracle: Oracle) -> None:
    if oracle.grows:
        pytest.skip("transformers re-bases this rope as the sequence grows, over keys rotated before")
    prompts = [tokens[:24] for tokens in oracle.tokens]
    with torch.inference_mode():
        theirs = oracle.model.generate(
            torch.tensor(prompts), max_new_tokens=LENGTH - 24, do_sample=False, pad_token_id=0
        )
    assert oracle.rig().generate(prompts, LENGTH - 24) == theirs[:, 24:].tolist()
