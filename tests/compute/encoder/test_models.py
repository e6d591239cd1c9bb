"""Embedding models and cross-encoders from folders: pooling files, prompts, Dense layers, activations, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.models import (
    TextTokenizer,
    _head,
    read_cross_encoder,
    read_embedding_model,
    read_pair_classifier,
    run,
)
from headrace.core.embedding import TokenRow
from tests.doubles.tiny_encoder import HIDDEN, WORDS, tokenizer, write_cross_encoder, write_embedding_model

CPU = torch.device("cpu")
ROWS = [TokenRow((2, 5, 6, 7, 3)), TokenRow((2, 8, 3)), TokenRow((2, 9, 10, 3))]


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken"])
def test_the_batch_changes_no_vector_and_keeps_the_order(pooling: str, tmp_path: Path) -> None:
    model = read_embedding_model("tiny", write_embedding_model(tmp_path, pooling), CPU)
    together = run(model.run(ROWS))
    assert together.shape == (3, model.dimensions)
    for row, vector in zip(ROWS, together, strict=True):
        np.testing.assert_allclose(run(model.run([row]))[0], vector, atol=1e-5)


def test_a_pass_pauses_after_each_layer(tmp_path: Path) -> None:
    model = read_embedding_model("tiny", write_embedding_model(tmp_path), CPU)
    assert len(list(model.run(ROWS))) == 2


def test_what_the_files_say(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "a ", "document": ""}, "default_prompt_name": "query"}
    folder = write_embedding_model(tmp_path, **prompts)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    model = read_embedding_model("tiny", folder, CPU)
    assert model.max_tokens == 9
    assert model.normalize
    assert model.prompts == {"query": "a ", "document": ""}
    assert model.default_prompt == "query"


def test_a_dense_layer_after_pooling(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path)
    plain = run(read_embedding_model("tiny", folder, CPU).run(ROWS))
    modules = json.loads((folder / "modules.json").read_text())
    modules[2] = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    described = {"in_features": HIDDEN, "out_features": 3, "bias": True}
    described["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(described))
    weight, bias = torch.randn(3, HIDDEN), torch.randn(3)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    model = read_embedding_model("tiny", folder, CPU)
    assert model.dimensions == 3
    assert not model.normalize
    expected = np.tanh(plain @ weight.numpy().T + bias.numpy())
    np.testing.assert_allclose(run(model.run(ROWS)), expected, atol=1e-5)


def test_scores_are_sigmoids_unless_the_config_names_the_identity(tmp_path: Path) -> None:
    pairs = [TokenRow((2, 5, 3, 6, 3), second=3), TokenRow((2, 5, 3, 7, 8, 3), second=3)]
    sigmoid = read_cross_encoder("tiny", write_cross_encoder(tmp_path / "a"), CPU)
    identity = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    plain = read_cross_encoder("tiny", write_cross_encoder(tmp_path / "b", **identity), CPU)
    logits, scores = run(plain.run(pairs)), run(sigmoid.run(pairs))
    assert scores.shape == (2, 1)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-6)


def test_the_second_text_has_its_own_type(tmp_path: Path) -> None:
    model = read_cross_encoder("tiny", write_cross_encoder(tmp_path), CPU)
    tokens = (2, 5, 3, 6, 3)
    one, other = run(model.run([TokenRow(tokens, second=3), TokenRow(tokens)]))[:, 0]
    assert abs(one - other) > 1e-6


def test_the_score_of_two_labels_is_the_probability_of_the_same_meaning(tmp_path: Path) -> None:
    pairs = [TokenRow((2, 5, 3, 6, 3), second=3), TokenRow((2, 5, 3, 7, 8, 3), second=3)]
    named = (
        {"0": "not_duplicate", "1": "duplicate"},
        {"0": "paraphrase", "1": "no paraphrase"},
        {"0": "LABEL_0", "1": "LABEL_1"},
    )
    models = [
        read_pair_classifier("tiny", write_cross_encoder(tmp_path / str(number), id2label=labels), CPU)
        for number, labels in enumerate(named)
    ]
    of_second, of_first, unnamed = (run(model.run(pairs)) for model in models)
    np.testing.assert_allclose(of_first, 1 - of_second, atol=1e-6)
    np.testing.assert_array_equal(unnamed, of_second)
    assert models[0].boundary == 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["BertModel"]}, "not a cross-encoder"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "has 3 labels"),
        ({"id2label": {"0": "a", "1": "b"}}, "labels a, b do not say which one means the same"),
        ({"id2label": {"0": "same", "1": "duplicate"}}, "do not say which one"),
    ],
)
def test_classifiers_of_pairs_that_are_refused(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_pair_classifier("tiny", write_cross_encoder(tmp_path, **config), CPU)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["BertModel"]}, "not a cross-encoder"),
        ({"id2label": {"0": "no", "1": "yes"}}, "has 2 labels"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "'torch.*Tanh'"),
    ],
)
def test_cross_encoders_that_are_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_cross_encoder("tiny", write_cross_encoder(tmp_path, **config), CPU)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "pooling max_tokens"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "include_prompt": false}',
            "include_prompt",
        ),
        ("config_sentence_transformers.json", '{"prompts": {"query": 1}}', "prompts must be"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "'q' is not among"),
        (
            "modules.json",
            '[{"path": "9", "type": "sentence_transformers.models.Dense"}]',
            "lacks in_features",
        ),
    ],
)
def test_files_that_are_refused(file: str, content: str, message: str, tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=message):
        read_embedding_model("tiny", folder, CPU)


CLS, SEP = 2, 3


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(letter) for letter in text.split())


@pytest.fixture
def texts() -> TextTokenizer:
    return TextTokenizer(tokenizer())


def test_a_cut_text_keeps_its_special_tokens(texts: TextTokenizer) -> None:
    whole, cut = (CLS, *ids("a b c"), SEP), (CLS, *ids("a b"), SEP)
    assert texts.texts(["a b c"]) == [TokenRow(whole)]
    assert texts.texts(["a b c", "a"], limit=4) == [TokenRow(cut), TokenRow((CLS, *ids("a"), SEP))]
    assert texts.texts(["a b c"], limit=5) == [TokenRow(whole)]


def test_many_texts_keep_their_order(texts: TextTokenizer) -> None:
    letters = [chr(ord("a") + index % 26) for index in range(100)]
    assert texts.texts(letters) == [TokenRow((CLS, *ids(letter), SEP)) for letter in letters]


@pytest.mark.parametrize(
    ("one", "other", "limit", "first", "second"),
    [
        ("a b", "c d", None, "a b", "c d"),
        ("a b c d e", "f", 7, "a b c", "f"),
        ("a", "c d e f g", 7, "a", "c d e"),
        ("a b c d", "e f g h", 8, "a b", "e f g"),
        ("a b c d", "e f g h", 7, "a b", "e f"),
    ],
)
def test_the_longer_text_of_a_pair_is_cut(
    texts: TextTokenizer, one: str, other: str, limit: int | None, first: str, second: str
) -> None:
    expected = (CLS, *ids(first), SEP, *ids(second), SEP)
    assert texts.pairs([(one, other)], limit) == [TokenRow(expected, len(ids(first)) + 2)]


def test_what_is_cut_off_a_long_text_is_not_processed(texts: TextTokenizer) -> None:
    whole = texts._encode(["a " * 1000], special=False)[0]
    head = _head(whole, 3)
    assert (head.ids, head.overflowing) == (whole.ids[:3], [])
    assert len(whole) == 1000


def test_a_limit_of_the_document_alone(texts: TextTokenizer) -> None:
    [row] = texts.pairs([("a b c", "d e f")], second_limit=1)
    assert row.tokens == (CLS, *ids("a b c"), SEP, *ids("d"), SEP)


def test_a_text_that_is_used_twice_is_not_changed(texts: TextTokenizer) -> None:
    rows = texts.pairs([("a b c d", "e f g h"), ("a b c d", "e")], limit=8)
    assert rows[1].tokens == (CLS, *ids("a b c d"), SEP, *ids("e"), SEP)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_room_beside_the_special_tokens(texts: TextTokenizer, limit: int) -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        texts.texts(["a"], limit)


def test_a_lone_surrogate(texts: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="Unicode"):
        texts.texts(["a", "\ud800"])


def test_lower_case() -> None:
    assert TextTokenizer(tokenizer(), lower_case=True).texts(["A b"]) == TextTokenizer(tokenizer()).texts(
        ["a b"]
    )
