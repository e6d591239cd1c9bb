"""Decoders as embedding models against transformers: vectors of the last token, in parts, from either kind of file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from headrace.compute.encoder import networks
from headrace.compute.encoder.models import run
from headrace.config import ModelOptions
from headrace.core.embedding import TokenRow
from headrace.wiring.embedding import read_causal_model
from tests.doubles.tiny_encoder import tokenizer

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LENGTHS = (1, 1, 2, 7, 16, 17, 40)


@pytest.mark.parametrize("kind", [Qwen3ForCausalLM, Qwen3Model])
@pytest.mark.parametrize("part", [5, 16, 1000])
def test_the_last_token_equals_transformers(
    kind: type, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "PART_TOKENS", part)
    torch.manual_seed(4)
    theirs = kind(Qwen3Config(**SIZES)).eval()
    for tensor in theirs.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    theirs.save_pretrained(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = read_causal_model("tiny", tmp_path, ModelOptions(device="cpu", dtype="float32"))
    drawn = torch.Generator().manual_seed(6)
    rows = [TokenRow(tuple(torch.randint(0, 64, (length,), generator=drawn).tolist())) for length in LENGTHS]
    whole = theirs.model if kind is Qwen3ForCausalLM else theirs
    with torch.inference_mode():
        expected = [whole(torch.tensor([row.tokens])).last_hidden_state[0, -1].numpy() for row in rows]
    np.testing.assert_allclose(run(model.run(rows)), np.stack(expected), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run(model.run(rows[:2])), np.stack(expected[:2]), rtol=1e-4, atol=1e-4)
    assert model.dimensions == SIZES["hidden_size"]
