"""Encoders and cross-encoders against transformers, on tiny random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from headrace.compute.encoder.families import parse_encoder_config
from headrace.compute.encoder.models import read_encoder, read_head, run
from headrace.compute.encoder.networks import pack, read_tensors
from headrace.compute.kernels import select
from headrace.compute.model.hub import read_config
from headrace.core.embedding import TokenRow

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 60,
    "pad_token_id": 1,
}
DISTIL = {
    "vocab_size": 50,
    "dim": 24,
    "hidden_dim": 40,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 60,
    "pad_token_id": 1,
}
MODERN = SIZES | {"num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}
MODERN |= {"bos_token_id": 2, "eos_token_id": 3}
MODELS: dict[str, tuple[dict[str, Any], Any, Any, Any]] = {
    "bert": (SIZES, BertConfig, BertModel, BertForSequenceClassification),
    "roberta": (
        SIZES | {"type_vocab_size": 1},
        RobertaConfig,
        RobertaModel,
        RobertaForSequenceClassification,
    ),
    "xlm-roberta": (
        SIZES | {"type_vocab_size": 1},
        XLMRobertaConfig,
        XLMRobertaModel,
        XLMRobertaForSequenceClassification,
    ),
    "distilbert": (DISTIL, DistilBertConfig, DistilBertModel, DistilBertForSequenceClassification),
    "mpnet": (SIZES, MPNetConfig, MPNetModel, MPNetForSequenceClassification),
    "modernbert": (MODERN, ModernBertConfig, ModernBertModel, ModernBertForSequenceClassification),
    "modernbert-mean": (
        MODERN | {"classifier_pooling": "mean"},
        ModernBertConfig,
        ModernBertModel,
        ModernBertForSequenceClassification,
    ),
}


def saved(family: str, head: bool, folder: Path) -> Any:
    """A model of transformers with random weights, saved in ``folder``."""
    torch.manual_seed(3)
    sizes, config, plain, classifier = MODELS[family]
    model = (classifier if head else plain)(config(**sizes, **({"num_labels": 1} if head else {}))).eval()
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    model.save_pretrained(folder)
    return model


def random_rows(lengths: tuple[int, ...]) -> list[TokenRow]:
    drawn = torch.Generator().manual_seed(5)
    return [
        TokenRow(tuple(torch.randint(4, 50, (length,), generator=drawn).tolist()), second=length // 2)
        for length in sorted(lengths)
    ]


def one_by_one(model: Any, rows: list[TokenRow], typed: bool) -> list[Any]:
    """Their outputs without any padding, which is the definition."""
    outputs = []
    for row in rows:
        tokens = torch.tensor([row.tokens])
        kinds = torch.tensor([[int(index >= row.second > 0) for index in range(len(row.tokens))]])
        given = {"token_type_ids": kinds} if typed else {}
        with torch.inference_mode():
            outputs.append(model(tokens, attention_mask=torch.ones_like(tokens), **given))
    return outputs


@pytest.mark.parametrize("family", [name for name in MODELS if name != "modernbert-mean"])
@pytest.mark.parametrize("lengths", [(7,), (5, 5), (3, 30, 8, 1)])
def test_hidden_states_equal_transformers(family: str, lengths: tuple[int, ...], tmp_path: Path) -> None:
    theirs = saved(family, head=False, folder=tmp_path)
    spec = parse_encoder_config(read_config(tmp_path))
    ours, _ = read_encoder(spec, read_tensors(tmp_path), select("auto", CPU), CPU)
    rows = random_rows(lengths)
    expected = one_by_one(theirs, rows, typed=family == "bert")
    actual = run(ours.layers(pack(rows, CPU)))
    torch.testing.assert_close(
        actual, torch.cat([each.last_hidden_state[0] for each in expected]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", MODELS)
def test_scores_of_pairs_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = saved(family, head=True, folder=tmp_path)
    spec = parse_encoder_config(read_config(tmp_path))
    assert spec.num_labels == 1
    ours, of = read_encoder(spec, read_tensors(tmp_path), select("auto", CPU), CPU)
    rows = random_rows((4, 9, 9, 20))
    packed = pack(rows, CPU)
    expected = torch.cat([each.logits for each in one_by_one(theirs, rows, typed=family == "bert")])
    actual = read_head(spec, of)(run(ours.layers(packed)), packed)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
