"""Tokens that only other files than ``tokenizer.json`` name; transformers is the oracle for every combination."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from headrace.config import ModelOptions
from headrace.text.named_tokens import shown_ends, turn_ends
from headrace.text.tokenizer import Tokenizer
from headrace.wiring.loading.text import load_text
from tests.text.test_tokenizer import write_folder as write_tokenizer
from tests.text.vocabularies import byte_fallback, byte_level

NAMES = ["<|a|>", "<|b|>", "<|c|>", "<|d|>", "</s>", "<pad>", "x", "<|inside|>"]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
TEXTS = [
    "the <|a|> fox<|b|>  <|c|>x<|d|></s> <|inside|>  x <pad>end",
    " <|a|><|a|> x<|b|> y",
    "no tokens at all",
]


def drawn_token(draw: random.Random, typed: bool, special: bool | None = None) -> dict[str, Any]:
    token: dict[str, Any] = {"content": draw.choice(NAMES)}
    token |= {name: draw.random() < 0.3 for name in FLAGS}
    if special is not None:
        token["special"] = special
    return token | ({"__type": "AddedToken"} if typed else {})


def drawn_files(draw: random.Random, size: int) -> dict[str, Any]:
    """Files with some of the fields, in the forms that transformers reads."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files: dict[str, Any] = {"tokenizer_config": config}
    for role in draw.sample(
        ["eos_token", "bos_token", "pad_token", "image_token", "unk_token"], draw.randrange(4)
    ):
        config[role] = draw.choice(
            [draw.choice(NAMES), drawn_token(draw, typed=True, special=draw.random() < 0.7)]
        )
    for field in ("additional_special_tokens", "extra_special_tokens"):
        if draw.random() < 0.35:
            config[field] = [
                draw.choice([draw.choice(NAMES), drawn_token(draw, typed=True)])
                for _ in range(draw.randrange(4))
            ]
    if draw.random() < 0.2:
        config["extra_special_tokens"] = {
            "audio_token": draw.choice(NAMES),
            "video_token": draw.choice(NAMES),
        }
    if draw.random() < 0.4:
        ids = draw.sample([size, size + 1, size + 2, size + 7, 5], draw.randrange(1, 4))
        names = draw.sample(NAMES, len(ids))
        config["added_tokens_decoder"] = {
            str(each): drawn_token(draw, typed=False, special=draw.random() < 0.5) | {"content": name}
            for each, name in zip(ids, names, strict=True)
        }
    if draw.random() < 0.5:
        older = files["special_tokens_map"] = {}
        for role in draw.sample(["eos_token", "bos_token", "pad_token", "image_token"], draw.randrange(4)):
            older[role] = draw.choice([draw.choice(NAMES), drawn_token(draw, typed=False)])
        if draw.random() < 0.4:
            older["additional_special_tokens"] = draw.sample(NAMES, draw.randrange(3))
    if draw.random() < 0.4:
        names = draw.sample(NAMES, draw.randrange(1, 4))
        files["added_tokens"] = {name: size + place for place, name in enumerate(names)}
    return files


def write_folder(folder: Path, backend: tokenizers.Tokenizer, files: dict[str, Any]) -> None:
    backend.save(str(folder / "tokenizer.json"))
    for path in folder.glob("*.json"):
        if path.name != "tokenizer.json":
            path.unlink()
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def described(backend: tokenizers.Tokenizer) -> dict[int, str]:
    return {number: repr(token) for number, token in backend.get_added_tokens_decoder().items()}


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 6))]
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_every_combination_of_files_adds_what_transformers_adds(make: Any, part: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = tokenizers.Tokenizer.from_str(make().backend.to_str())
    source.add_tokens([AddedToken("<|inside|>", special=False, lstrip=True)])
    added = 0
    for number in range(40):
        draw = random.Random(part * 1000 + number)
        files = drawn_files(draw, source.get_vocab_size())
        write_folder(tmp_path, source, files)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = Tokenizer.from_folder(tmp_path)
        assert described(ours.backend) == described(theirs.backend_tokenizer), files
        assert ours.vocab_size == len(theirs)
        for text in TEXTS:
            tokens = ours.encode(text, add_special_tokens=False)
            assert tokens == theirs.encode(text, add_special_tokens=False), (files, text)
            assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True), (files, text)
        if "added_tokens_decoder" not in files["tokenizer_config"]:
            assert (ours.eos_token, ours.bos_token) == (theirs.eos_token, theirs.bos_token), files
        added += ours.vocab_size > source.get_vocab_size()
    assert added > 10


TEMPLATES = {
    "chatml": ("{{ '<|im_start|>' + role + content + '<|im_end|>' }}", ["<|im_end|>"]),
    "cohere": (
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{{ c }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ["<|END_OF_TURN_TOKEN|>"],
    ),
    "exaone4": ("{{ '[|assistant|]' + c + '[|endofturn|]' }}", ["[|endofturn|]"]),
    "gemma4": ("{{ '<|turn>model\\n' + c + '<turn|>' }}", ["<turn|>"]),
    "glm45": (
        "<|user|>{{ c }}<|assistant|>{{ c }}<|observation|><tool_response>",
        [],
    ),
    "granite": (
        "<|start_of_role|>assistant<|end_of_role|>{{ c }}<|end_of_text|>",
        ["<|end_of_text|>"],
    ),
    "harmony": ("<|start|>assistant<|message|>{{ c }}<|end|><|call|><|return|>", ["<|call|>", "<|return|>"]),
    "lfm2": ("{{ '<|im_start|>assistant\\n' + c + '<|im_end|>' }}", ["<|im_end|>"]),
    "llama4": ("<|header_start|>assistant<|header_end|>{{ c }}<|eot|>", ["<|eot|>"]),
    "minimax_m2": ("{{ ']~b]ai\\n' + c + '[e~[' }}", ["[e~["]),
    "phi4": ("<|user|>{{ c }}<|end|><|assistant|>", ["<|end|>"]),
    "seed_oss": ("<seed:bos>assistant\n{{ c }}<seed:eos>", ["<seed:eos>"]),
}
MARKS = sorted(
    {mark for _, ends in TEMPLATES.values() for mark in ends} | {"<|im_start|>", "<|start|>", "<|user|>"}
)
HARMONY = {"<|call|>", "<|return|>"}
CONTROL = {mark: 100 + place for place, mark in enumerate(MARKS)}


@pytest.mark.parametrize("family", TEMPLATES)
def test_ends_that_a_template_writes(family: str) -> None:
    template, ends = TEMPLATES[family]
    # The tokens of gpt-oss say that its <|end|> ends no answer, so that no other vocabulary has them.
    control = {mark: id for mark, id in CONTROL.items() if family == "harmony" or mark not in HARMONY}
    assert shown_ends(control, [template]) == sorted(CONTROL[end] for end in ends)


@pytest.mark.parametrize("beside", [("<|return|>", "<|call|>"), ("<|begin|>", "<|content|>")])
def test_the_end_of_a_message_ends_no_answer(beside: tuple[str, ...]) -> None:
    """Whatever else the template writes: one that is given with ``--chat-template`` may not write calls."""
    control = {mark: number for number, mark in enumerate(("<|end|>", *beside))}
    template = "<|begin|>assistant<|content|>{{ c }}<|end|>"
    assert control["<|end|>"] not in shown_ends(control, [template])
    assert control["<|end|>"] not in turn_ends(control)


def test_of_no_template_none() -> None:
    assert shown_ends(CONTROL, []) == []
    assert turn_ends({"<|im_start|>": 1, "<tool_call>": 2}) == []


def folder(tmp_path, template: str, *, special: bool) -> ModelOptions:
    tokenizer = byte_level.__wrapped__()  # one of its own, which gets a token more
    tokenizer.backend.add_tokens([AddedToken("<|im_end|>", special=special, normalized=False)])
    files = {
        "tokenizer_config": {"chat_template": template, "eos_token": "</s>"},
        "generation_config": {"eos_token_id": tokenizer.backend.token_to_id("</s>")},
        "config": {"architectures": ["LlamaForCausalLM"]},
    }
    path = write_tokenizer(tmp_path, tokenizer, **files)
    return ModelOptions(model=str(path), load_format="dummy")


@pytest.mark.parametrize("special", [True, False])
def test_a_model_that_names_another_end_stops_at_that_of_its_template_too(tmp_path, special: bool) -> None:
    tokenizer = load_text(folder(tmp_path, "{{ content }}<|im_end|>", special=special), "auto").tokenizer
    names = {tokenizer.token(id) for id in tokenizer.eos_token_ids}
    assert names == ({"</s>", "<|im_end|>"} if special else {"</s>"})  # else it is a word of texts
    assert Tokenizer.from_folder(tmp_path).eos_token_ids < tokenizer.eos_token_ids or not special


def test_a_token_that_the_template_does_not_write_ends_nothing(tmp_path) -> None:
    tokenizer = load_text(folder(tmp_path, "{{ content }}</s>", special=True), "auto").tokenizer
    assert {tokenizer.token(id) for id in tokenizer.eos_token_ids} == {"</s>"}
