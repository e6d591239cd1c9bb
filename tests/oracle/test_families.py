"""Every family computes what transformers computes, however the positions are cut into steps and blocks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from headrace.compute.kernels import KernelsUnavailable, select
from tests.oracle.families import CASES, LENGTH, VOCAB
from tests.oracle.harness import DEVICE, Rig, Sequence


@dataclass
class Oracle:
    model: PreTrainedModel
    folder: Path
    tokens: list[list[int]]
    logits: list[Tensor]
    grows: bool

    kernels: str = "torch"

    def rig(self, **options: int) -> Rig:
        return Rig(self.folder, max_model_len=LENGTH, kernels=self.kernels, **options)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    made = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = made.build(folder)
    tokens = torch.randint(1, VOCAB, (5, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = [model(row[None]).logits[0] for row in tokens]
    return Oracle(model, folder, tokens.tolist(), logits, made.grows)


@pytest.fixture(params=["torch", "cpp"])
def oracle(case: Oracle, request: pytest.FixtureRequest) -> Oracle:
    try:
        select(request.param, DEVICE)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return replace(case, kernels=request.param)


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
    if rig.decoder.states is None:  # states are shared by checkpoints: see test_native_engine
        sharing = Sequence(oracle.tokens[0], blocks=first.blocks[:5], computed=20)
        close(rig.logits(sharing, [11]), oracle.logits[0][20:])
    again = Sequence(oracle.tokens[0])
    close(rig.logits(again, [LENGTH]), oracle.logits[0])


def test_greedy_text(oracle: Oracle) -> None:
    if oracle.grows:
        pytest.skip("transformers re-bases this rope as the sequence grows, over keys rotated before")
    prompts = [tokens[:24] for tokens in oracle.tokens]
    oracle.model.generation_config.eos_token_id = None  # the rig does not stop at the end token either
    with torch.inference_mode():
        theirs = oracle.model.generate(
            torch.tensor(prompts), max_new_tokens=LENGTH - 24, do_sample=False, pad_token_id=0
        )
    ours = oracle.rig().generate(prompts, LENGTH - 24)
    assert ours == theirs[:, 24:].tolist()


def test_gemma3_text_model_inside_a_larger_one(tmp_path: Path) -> None:
    model = CASES["gemma3"].build(tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    tokens = list(range(1, LENGTH + 1))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    for name, prefix in (("older", "language_model.model."), ("newer", "model.language_model.")):
        folder = tmp_path / name
        folder.mkdir()
        renamed = {key.replace("model.", prefix, 1): value for key, value in tensors.items()}
        save_file(renamed | {"vision_tower.patch.weight": torch.zeros(2)}, folder / "model.safetensors")
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
        (folder / "config.json").write_text(json.dumps(outer))
        close(Rig(folder, max_model_len=LENGTH).logits(Sequence(tokens), [LENGTH]), expected)
