from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peers.shapes import SHAPES, DeltaMixers, Shape
from benchmarks.peers.vocabulary import WORDS
from benchmarks.peers.weights import write_folder
from headrace import LLM, SamplingParams

TINY = dataclasses.replace(
    SHAPES["qwen3-0.6b"],
    name="tiny",
    hidden=64,
    intermediate=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=700,
    positions=128,
)


HYBRID = dataclasses.replace(
    TINY,
    name="hybrid",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    layers=4,
    mixers=DeltaMixers(heads=4, head_dim=16),
)


@pytest.mark.parametrize("shape", [TINY, HYBRID], ids=lambda shape: shape.name)
def test_a_folder_is_a_checkpoint_that_answers_in_words_only(tmp_path: Path, shape: Shape) -> None:
    folder = write_folder(shape, tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(each.shape) for name, each in tensors.items()} == dict(shape.tensors())
    assert all(each.dtype == torch.bfloat16 for each in tensors.values())
    llm = LLM(str(folder), device="cpu")
    reported = llm.generate(
        [[300, 301, 302]], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    )
    assert min(reported[0].outputs[0].token_ids) >= WORDS
    assert reported[0].outputs[0].text.count(" w") == 24


def test_a_folder_is_written_once(tmp_path):
    folder = write_folder(TINY, tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"kept")
    write_folder(TINY, folder)
    assert (folder / "model.safetensors").read_bytes() == b"kept"
