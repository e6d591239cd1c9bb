"""The corpus, the tokenizer and the files of the built-in models."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training.corpus import documents
from training.evaluate import follows
from training.induction import lay_induction
from training.model import DENSE, DRAFT, TARGET, Decoder, Shape, parameter_count, save_model
from training.natural import NATURAL
from training.tasks_facts import make_list
from training.tokenizer import BOS, END, SPECIALS, encode_batch
from training.train import HeadLoss, Recipe, batches, train

BUILTIN = Path(__file__).resolve().parents[2] / "headrace" / "builtin"
NAMES = ("target", "draft")
SHAPES = {"target": TARGET, "draft": DRAFT}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUILTIN / "target" / "tokenizer.json"))


@pytest.mark.parametrize("lesson", ["all", "long", "chapters", "copying"])
def test_corpus_is_the_same_for_the_same_seed(lesson: str) -> None:
    first, second = (list(islice(documents(3, lesson), 30)) for _ in range(2))
    assert first == second
    assert first != list(islice(documents(4, lesson), 30))


def test_corpus_texts_have_no_holes_and_no_outer_space() -> None:
    for document in islice(documents(5), 500):
        assert bool(document.text) != bool(document.messages)
        for _, content in document.messages:
            assert content
            assert content == content.strip()
        roles = [role for role, _ in document.messages if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@settings(max_examples=200)
@given(text=st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_has_all_bytes_and_its_special_tokens_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == TARGET.vocab
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == list(range(len(SPECIALS)))
    assert tokenizer.encode("hello").tokens[0] == BOS
    text = bytes(range(256)).decode("latin-1") + "日本語🙂"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_training_sees_what_the_chat_template_renders(tokenizer: Tokenizer) -> None:
    import jinja2

    config = json.loads((BUILTIN / "target" / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(config["chat_template"])
    for document in islice(documents(6), 50):
        messages = [{"role": role, "content": content} for role, content in document.messages]
        if not messages:
            continue
        ids = encode_batch(tokenizer, [document])[0][0].tolist()
        rendered = template.render(messages=messages, bos_token=BOS)
        assert tokenizer.encode(rendered, add_special_tokens=False).ids == ids
        asked = template.render(messages=messages[:-1], bos_token=BOS, add_generation_prompt=True)
        assert rendered.startswith(asked)
        assert rendered.endswith(END)


def test_template_takes_content_parts_and_unknown_roles() -> None:
    import jinja2

    config = json.loads((BUILTIN / "target" / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(config["chat_template"])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    assert template.render(messages=messages, bos_token=BOS) == f"{BOS}<|system|>x{END}<|user|>ab{END}"
    assert template.render(messages=[{"role": "assistant", "content": None}], bos_token=BOS).endswith(END)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_model_keeps_its_limits(name: str) -> None:
    folder, shape = BUILTIN / name, SHAPES[name]
    weights = load_file(folder / "model.safetensors")
    count = sum(tensor.numel() for tensor in weights.values())
    low, high = {"target": (3_000_000, 8_000_000), "draft": (300_000, 1_000_000)}[name]
    assert low <= count <= high
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in weights
    assert config["max_position_embeddings"] >= 4096
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    expected = {key: value.shape for key, value in Decoder(shape).state_dict().items()}
    assert {key: value.shape for key, value in weights.items()} == expected


def test_both_models_share_a_tokenizer_and_are_small_together() -> None:
    assert len({(BUILTIN / name / "tokenizer.json").read_bytes() for name in NAMES}) == 1
    assert sum(path.stat().st_size for path in BUILTIN.rglob("*") if path.is_file()) < 20_000_000


def test_batches_learn_answers_only(tokenizer: Tokenizer) -> None:
    batch = next(batches(tokenizer, seed=1, budget=1024, shard=64))
    assert batch.ids.shape == batch.positions.shape
    assert batch.rows.shape == batch.labels.shape == batch.weights.shape
    assert bool((batch.weights > 0).all())
    assert (
        SPECIALS.index(END) in batch.labels.tolist()
        or SPECIALS.index("<|endoftext|>") in batch.labels.tolist()
    )


TINY = Shape(hidden=48, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=32)


def test_given_words_have_the_tokens_with_which_they_are_repeated(tokenizer: Tokenizer) -> None:
    text = "grey boats sailed past Oskar"
    alone = tokenizer.encode(text, add_special_tokens=False).ids
    for request in ("Copy this: {}", "Say exactly this:\n{}", 'Repeat "{}"', "Copy {}"):
        ids = tokenizer.encode(request.format(text), add_special_tokens=False).ids
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


def test_a_fresh_decoder_copies() -> None:
    torch.manual_seed(0)
    model = Decoder(TARGET)
    lay_induction(model, seed=0)
    text = torch.randperm(TARGET.vocab)[:24]
    ids = torch.cat((text, text))[None]
    logits = model(ids, torch.arange(48)[None], torch.arange(24, 47))
    assert (logits.argmax(-1) == ids[0, 25:]).float().mean() > 0.8


def test_loss_of_the_head_has_the_gradients_of_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 32, requires_grad=True)
    embedding = torch.randn(50, 32, requires_grad=True)
    labels, weights = torch.randint(0, 50, (6,)), torch.rand(6)
    loss = HeadLoss.apply(hidden, embedding, labels, weights)
    expected = (
        torch.nn.functional.cross_entropy(hidden @ embedding.T, labels, reduction="none") * weights
    ).sum()
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.01)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, embedding)),
        torch.autograd.grad(expected, (hidden, embedding)),
        strict=True,
    ):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.02)


def test_dense_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    ids = torch.randint(0, TINY.vocab, (1, DENSE + 1))
    rows = torch.arange(DENSE)
    dense = model(ids[:, :DENSE], rows[None], rows)
    flash = model(ids, torch.arange(DENSE + 1)[None], rows)
    torch.testing.assert_close(dense, flash, rtol=1e-3, atol=1e-3)


def test_a_list_must_have_the_asked_number_of_different_items() -> None:
    r = random.Random(1)
    for _ in range(300):
        task = make_list(r)
        answer = task.turns[0][1]
        assert follows(task, answer)
        last = re.split(r"\n|, ", answer)[-1]
        assert not follows(task, f"{answer}\n{last}" if "\n" in answer else f"{answer}, {last}")


def test_rules_for_requests_by_hand_tell_right_from_wrong() -> None:
    rules = dict(NATURAL)
    assert len(rules) == len(NATURAL)
    animals = rules["List three animals."]
    assert animals("1. cat\n2. dog\n3. horse")
    assert not animals("1. cat\n2. cat\n3. cat")
    oskar = rules["Write a small JSON object for a person named Oskar, age 31."]
    assert oskar('{"name": "Oskar", "age": 31}')
    assert not oskar('{"age": 31, "age": 31}')
    assert not oskar('{"name": "Oskar", "name": "Oskar", "age": 31}')
    adds = rules["Write a Python function that adds two numbers."]
    assert adds("```python\ndef add(a, b):\n    return a + b\n```")
    assert not adds("```python\ndef add(a, b):\nreturn a + b\n```")


def test_training_is_the_same_for_the_same_seed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = Recipe(
        TINY, steps=3, copy_steps=1, long_steps=1, batch_tokens=256, micro_batches=2, warmup=1, shard=32
    )
    models = [train(recipe, tokenizer, tmp_path / str(i), seed=1) for i in range(2)]
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_later_stage_goes_on_from_the_weights_before_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = Recipe(
        TINY, steps=2, copy_steps=1, long_steps=0, batch_tokens=256, micro_batches=2, warmup=1, shard=32
    )
    before = train(recipe, tokenizer, tmp_path / "tiny", seed=1).state_dict()
    nothing = replace(recipe, steps=0, copy_steps=0)
    after = train(nothing, tokenizer, tmp_path / "tiny", seed=1, stage=1).state_dict()
    assert all(torch.equal(before[key].bfloat16().float(), after[key]) for key in before)
    learned = train(replace(recipe, lesson="chapters"), tokenizer, tmp_path / "tiny", seed=1, stage=1)
    assert any(not torch.equal(after[key], value) for key, value in learned.state_dict().items())


def test_decoder_is_the_one_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = Decoder(TINY)
    save_model(model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocab, (1, 40))
    with torch.no_grad():
        ours = model(ids, torch.arange(40)[None], torch.arange(40))
        theirs = reference(ids).logits[0]
    torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
    assert parameter_count(model) == sum(p.numel() for p in reference.parameters())
