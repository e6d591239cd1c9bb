"""Tokens that only other files than ``tokenizer.json`` name; transformers is the oracle for every combination."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from headrace.text.tokenizer import Tokenizer
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
