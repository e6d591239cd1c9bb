from __future__ import annotations

import math

import pytest

from headrace.api.compile.model import ServedModel
from headrace.api.logprobs import LOWEST, chat_logprobs, completion_logprobs, prompt_entries, prompt_logprobs
from headrace.core.plan import TokenLogprob
from headrace.text.template import ChatTemplate
from tests.text.vocabularies import byte_level, word_piece

TOKENIZER = byte_level()


FOX, DOG = (TOKENIZER.encode(word, add_special_tokens=False)[0] for word in (" fox", " dog"))


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel("fox", TOKENIZER, ChatTemplate({}), 100, 420)


def test_chat_tells_text_bytes_and_alternatives(model):
    entry = TokenLogprob(FOX, -0.25, 2, ((DOG, -0.1), (FOX, -0.25)))
    content = chat_logprobs(model, [entry], 1)["content"]
    assert content == [
        {
            "token": " fox",
            "logprob": -0.25,
            "bytes": list(b" fox"),
            "top_logprobs": [{"token": " dog", "logprob": -0.1, "bytes": list(b" dog")}],
        }
    ]


def test_half_a_character_shows_its_bytes(model):
    token = next(t for t in range(420) if model.streams.token_bytes(t) == b"\xf0")
    entry = chat_logprobs(model, [TokenLogprob(token, -1.0, 1, ())], 0)["content"][0]
    assert entry["bytes"] == [0xF0]
    assert entry["token"] == "\ufffd"


def test_json_has_no_infinity(model):
    entry = TokenLogprob(FOX, -math.inf, 400, ())
    assert chat_logprobs(model, [entry], 0)["content"][0]["logprob"] == LOWEST
    assert completion_logprobs(model, [entry], [0], 0)["token_logprobs"] == [LOWEST]


def test_a_completion_names_alternatives_by_text_and_always_the_chosen(model):
    entry = TokenLogprob(FOX, -3.0, 9, ((DOG, -0.1),))
    shown = completion_logprobs(model, [entry], [4], 1)
    assert shown["tokens"] == [" fox"]
    assert shown["top_logprobs"] == [{" dog": -0.1, " fox": -3.0}]
    assert shown["text_offset"] == [4]


def test_a_prompts_first_token_is_predicted_by_nothing(model):
    scored = {1: TokenLogprob(DOG, -2.0, 3, ((FOX, -0.5),))}
    entries = prompt_entries([FOX, DOG], scored)
    shown = completion_logprobs(model, entries, [0, 4], 1)
    assert shown["tokens"] == [" fox", " dog"]
    assert shown["token_logprobs"] == [None, -2.0]
    assert shown["top_logprobs"][0] is None
    first, second = prompt_logprobs(model, entries, 1)
    assert first is None
    assert second == {
        str(FOX): {"logprob": -0.5, "rank": 1, "decoded_token": " fox"},
        str(DOG): {"logprob": -2.0, "rank": 3, "decoded_token": " dog"},
    }


def test_tokenizers_without_pieces_spell_tokens_too():
    tokenizer = word_piece()
    model = ServedModel("x", tokenizer, ChatTemplate({}), 100, tokenizer.vocab_size)
    token = tokenizer.encode("fox", add_special_tokens=False)[0]
    assert model.streams.token_bytes(token).decode() in "fox"
