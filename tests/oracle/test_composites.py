"""The text part of a model that also reads images computes what the whole model computes for text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.compute.model.weights import read_spec
from tests.oracle.harness import Rig, Sequence
from tests.oracle.tiny import Tiny, build

LENGTH = 40
KINDS = (
    "deepseek_vl",
    "granite_docling",
    "idefics2",
    "internvl",
    "llava",
    "llava_onevision",
    "paddleocr_vl",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "video_llama_3",
)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_computed_as_by_the_whole_model(kind: str, tmp_path: Path) -> None:
    model = build(kind, "image-text", Tiny())
    model.save_pretrained(tmp_path)
    assert read_spec(tmp_path).nested_checkpoint
    tokens = torch.randint(1, 200, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = model(input_ids=tokens[None]).logits[0].float()
    ours = Rig(tmp_path, LENGTH).logits(Sequence(tokens.tolist()), [13, 2, 1, 3])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
