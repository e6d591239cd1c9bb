"""Tokenizers and templates from metadata: token types, end tokens, flags, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.text.gguf import CUTS, read_templates, read_tokenizer
from headrace.text.tokenizer import TokenizerError
from tests.text.vocabularies import CORPUS, byte_fallback, byte_level, metadata

KEY = "tokenizer.ggml."
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "  two  spaces ",
    "tab\tand\r\nline",
    "0123456789 ½",
    "<s>",
    "a</s>b",
    "\u200d🎉",
]


def changed(values: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Metadata with other values; None removes one."""
    values = values | {f"{KEY}{name}": value for name, value in others.items()}
    return {key: value for key, value in values.items() if value is not None}


def with_tokens(values: dict[str, Any], **kinds: int) -> dict[str, Any]:
    """Metadata with more tokens, by their types."""
    tokens, types = values[f"{KEY}tokens"], values[f"{KEY}token_type"]
    more = {"scores": [*values[f"{KEY}scores"], *(0.0 for _ in kinds)]} if f"{KEY}scores" in values else {}
    return changed(values, tokens=[*tokens, *kinds], token_type=[*types, *kinds.values()], **more)


BYTES = metadata(byte_level().backend, "gpt-2")
SCORES = metadata(byte_fallback().backend)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_texts_have_the_tokens_of_the_original(text: str) -> None:
    original, ours = byte_level(), read_tokenizer(BYTES)
    assert ours.encode(text) == original.encode(text)
    assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))


def test_special_tokens_have_their_roles() -> None:
    ours, original = read_tokenizer(BYTES), byte_level()
    assert ours.special_tokens == original.special_tokens
    assert ours.special_token_ids == original.special_token_ids
    assert (ours.bos_token_id, ours.eos_token_ids) == (original.bos_token_id, original.eos_token_ids)


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_keeps_all_text(name: str) -> None:
    ours = read_tokenizer(BYTES | {f"{KEY}pre": name})
    for text in TEXTS:
        if "é" not in text:  # an added token of this vocabulary, which the library decodes as a byte
            assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "a 1234", ["a", " 1234"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "a 1234's", ["a", " ", "123", "4", "'s"]),
        ("qwen2", "a 12'S", ["a", " ", "1", "2", "'S"]),
        ("tekken", "aBc'S 12", ["a", "Bc", "'S", " ", "1", "2"]),
        ("gpt-4o", "aBc's 1234", ["a", "Bc's", " ", "123", "4"]),
        ("deepseek-v3", "a1234一二b", ["a", "123", "4", "一二", "b"]),
        ("deepseek-llm", "a 12一b", ["a", " ", "1", "2", "一", "b"]),
        ("deepseek-coder", "a, b\n", ["a", ",", " b", "\n"]),
    ],
)
def test_cuts(name: str, text: str, words: list[str]) -> None:
    backend = read_tokenizer(BYTES | {f"{KEY}pre": name}).backend
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)  # type: ignore[union-attr]
    assert [text[start:end] for _, (start, end) in pieces] == words


def test_texts_of_scored_vocabularies_have_spaces_and_bytes() -> None:
    ours = read_tokenizer(with_tokens(SCORES, **{"▁t": 1, "he": 1, "fo": 1}))
    assert [ours.token(id) for id in ours.encode("the fox")] == ["<s>", "▁the", "▁fox"]
    last = ours.encode("€", add_special_tokens=False)[-3:]
    assert [ours.token(id) for id in last] == ["<0xE2>", "<0x82>", "<0xAC>"]
    for text in TEXTS:
        if "<s>" not in text and "</s>" not in text:
            assert ours.decode(ours.encode(text)) == text


def test_no_space_is_put_first_where_the_file_says_so() -> None:
    ours = read_tokenizer(changed(SCORES, add_space_prefix=False, add_bos_token=False))
    assert [ours.token(id) for id in ours.encode("er")] == ["er"]
    assert ours.decode(ours.encode(" fox")) == " fox"


def test_equal_scores_merge_the_longer_left_part_first() -> None:
    """As transformers' converter orders them: runs of spaces share one score in Llama's vocabulary."""
    kinds = {"▁▁": 1, "▁▁▁▁": 1, "▁▁▁▁▁▁": 1}
    values = with_tokens(changed(SCORES, add_space_prefix=False, add_bos_token=False), **kinds)
    scores = [-1e9 if "▁▁" in text else 0.0 for text in values[f"{KEY}tokens"]]
    ours = read_tokenizer(changed(values, scores=scores))
    assert [ours.token(id) for id in ours.encode(" " * 7)] == ["▁▁▁▁▁▁", "▁"]


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True), (True, True), (False, False)])
def test_flags_say_what_is_put_around_a_text(first: bool, last: bool) -> None:
    ours = read_tokenizer(changed(BYTES, add_bos_token=first, add_eos_token=last))
    plain = ours.encode("fox", add_special_tokens=False)
    assert ours.encode("fox") == [*[ours.bos_token_id] * first, *plain, *[ours.eos_token_id] * last]


@pytest.mark.parametrize(("name", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_without_a_flag_the_cutting_rules_decide(name: str, begins: bool) -> None:
    ours = read_tokenizer(BYTES | {f"{KEY}pre": name})
    assert (ours.encode("fox")[0] == ours.bos_token_id) is begins


def test_all_end_tokens_of_the_file_count() -> None:
    values = with_tokens(BYTES, **{"<|im_end|>": 3, "<|eot_id|>": 1, "<turn>": 3, "<stop>": 3})
    tokens = values[f"{KEY}tokens"]
    ours = read_tokenizer(
        changed(values, eot_token_id=tokens.index("<turn>"), eos_token_ids=[tokens.index("<stop>")])
    )
    ends = {tokens[id] for id in ours.eos_token_ids}
    assert ends == {"</s>", "<|im_end|>", "<turn>", "<stop>"}  # <|eot_id|> is a word of this vocabulary


def test_the_end_of_a_message_ends_no_answer_of_gpt_oss() -> None:
    ours = read_tokenizer(with_tokens(BYTES, **{"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}))
    assert {ours.token(id) for id in ours.eos_token_ids} == {"</s>", "<|return|>", "<|call|>"}


def test_types_of_tokens() -> None:
    values = with_tokens(BYTES, **{"<control>": 3, "<tool>": 4, "<unused>": 5, "<plain>": 1})
    padding = f"[PAD{len(values[f'{KEY}tokens'])}]"
    ours = read_tokenizer(with_tokens(values, **{padding: 4}))
    one = {
        text: len(ours.encode(text)) == 1 for text in ("<control>", "<tool>", "<unused>", "<plain>", padding)
    }
    assert one == {"<control>": True, "<tool>": True, "<unused>": False, "<plain>": False, padding: False}
    assert ours.decode(ours.encode("<control><tool>")) == "<tool>"
    assert "<control>" in ours.added.special
    assert "<tool>" in ours.added.marks


@pytest.mark.parametrize(("architecture", "kept"), [("phi3", "a<|end|>▁b"), ("llama", "a<|end|>▁<0x0A>▁b")])
def test_phi_3_takes_the_spaces_after_its_tokens_along(architecture: str, kept: str) -> None:
    values = with_tokens(changed(SCORES, add_bos_token=False), **{"<|end|>": 3})
    values[f"{KEY}tokens"] = ["<nl>" if text == "\n" else text for text in values[f"{KEY}tokens"]]
    ours = read_tokenizer(values | {"general.architecture": architecture})
    assert "".join(str(ours.token(id)) for id in ours.encode("a<|end|>\n b")).removeprefix("▁") == kept


def test_templates_by_name() -> None:
    values = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["x"],
    }
    assert read_templates(values) == {"default": "a", "tool_use": "b"}
    assert read_templates({}) == {}
    with pytest.raises(TokenizerError, match=r"tokenizer\.chat_template must be a text"):
        read_templates({"tokenizer.chat_template": 3})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (changed(BYTES, model="rwkv"), "model 'rwkv' is not supported; supported are: gpt2, llama, gemma4"),
        (changed(BYTES, model=None), "has no tokenizer.ggml.model"),
        (changed(BYTES, pre="unheard-of"), "pre is 'unheard-of', which is not known.*known are: command-r"),
        (changed(BYTES, pre=None), "pre is missing"),
        (changed(BYTES, merges=None), "has no tokenizer.ggml.merges"),
        (changed(BYTES, merges=["ab"]), "merges has 'ab', which is not two tokens"),
        (changed(BYTES, merges=["q zzz"]), "tokens and merges make no tokenizer"),
        (changed(BYTES, merges=[1]), "merges must be a list of texts"),
        (changed(BYTES, tokens=None), "has no tokenizer.ggml.tokens"),
        (changed(BYTES, token_type=[1]), "token_type has 1 entries for"),
        (changed(BYTES, tokens=["<s>"] * len(BYTES[f"{KEY}tokens"])), "tokens has '<s>' twice"),
        (changed(BYTES, eos_token_id=10**6), "eos_token_id is 1000000, and the vocabulary has"),
        (changed(BYTES, eos_token_ids=[-1]), "eos_token_ids has ids outside"),
        (changed(BYTES, add_bos_token=1), "add_bos_token must be a flag, got 1"),
        (changed(SCORES, scores=[0.0]), "scores has 1 entries for"),
    ],
)
def test_metadata_that_make_no_tokenizer(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason) as raised:
        read_tokenizer(values)
    assert "\n" not in str(raised.value)
