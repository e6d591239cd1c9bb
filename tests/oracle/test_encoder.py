"""The encoder against transformers, on tiny random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from headrace.compute.encoder.bert import Bert, parse_bert_config, read_tensors
from headrace.compute.model.hub import read_config

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
MODELS = {"bert": (BertConfig, BertModel), "roberta": (RobertaConfig, RobertaModel)}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("lengths", [(7,), (5, 5), (3, 11, 8)])
def test_equals_transformers(family: str, lengths: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(3)
    config, model = MODELS[family]
    theirs = model(config(**SIZES)).eval()
    for tensor in theirs.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = Bert(parse_bert_config(read_config(tmp_path)), read_tensors(tmp_path))

    tokens = torch.full((len(lengths), max(lengths)), 1)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(2, 50, (length,))
        mask[row, :length] = True
    with torch.inference_mode():
        expected = theirs(tokens, attention_mask=mask.long()).last_hidden_state
    actual = ours.forward(tokens, None if mask.all() else mask)
    torch.testing.assert_close(actual[mask], expected[mask], rtol=1e-4, atol=1e-5)
