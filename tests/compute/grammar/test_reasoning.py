"""A limit of reasoning: what is counted, when the end marker is forced, and with which tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from headrace.compute.grammar.compiler import Compiler, ReasoningCount, spelt
from headrace.compute.grammar.matchers import Matchers
from headrace.core.constraint import ANY_TEXT, Constraint, ReasoningLimit, as_constraint
from tests.compute.fakes import entry
from tests.doubles.scripted_model import with_special_tokens
from tests.text.vocabularies import byte_level

PLAIN = byte_level()
MARKED = with_special_tokens(["<think>", "</think>"])
THINK = ("<think>",), ("</think>",)
END = "</think>"


def count(limit: ReasoningLimit, tokenizer=PLAIN) -> ReasoningCount:
    source = tokenizer.backend.to_str()
    added = {each["content"]: each["id"] for each in json.loads(source)["added_tokens"]}
    reader = LLTokenizer(source)
    return ReasoningCount(limit, spelt(limit.end[0], added, reader), reader, {})


def tokens_of(text: str, tokenizer=PLAIN) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def follow(counted: ReasoningCount, said: str, tokenizer=PLAIN) -> str:
    """What the model says where it wants to say ``said`` and obeys."""
    drawn: list[int] = []
    wanted = tokens_of(said, tokenizer)
    while wanted or counted.forced is not None:
        token = wanted.pop(0) if counted.forced is None else counted.forced
        counted.consume(token)
        drawn.append(token)
    return tokenizer.decode(drawn, skip_special_tokens=False)


def cut(said: str, tokens: int, tokenizer=PLAIN) -> tuple[str, str]:
    """The text of the first tokens, and the rest."""
    drawn = tokens_of(said, tokenizer)
    assert len(drawn) > tokens
    first = tokenizer.decode(drawn[:tokens], skip_special_tokens=False)
    return first, said.removeprefix(first)


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "special"])
def test_the_end_is_forced_after_so_many_tokens_and_then_all_is_free(tokenizer):
    limit = ReasoningLimit(5, *THINK, opened=True)
    said = "12345678 9 <think>12"
    first, rest = cut(said, 5, tokenizer)
    assert follow(count(limit, tokenizer), said, tokenizer) == f"{first}</think>{rest}"
    assert follow(count(ReasoningLimit(0, *THINK, opened=True)), "hi") == "</think>hi"


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "special"])
def test_reasoning_that_ends_in_time_is_left_alone(tokenizer):
    said = "abc</think>defghijk"
    assert follow(count(ReasoningLimit(12, *THINK, opened=True), tokenizer), said, tokenizer) == said


def test_reasoning_that_the_model_begins_is_counted_from_its_marker():
    limit = ReasoningLimit(3, *THINK)
    assert follow(count(limit), "\n<think>123456") == "\n<think>123</think>456"
    assert follow(count(limit), "no <think>123456") == "no <think>123456"
    anywhere = ReasoningLimit(3, *THINK, first=False)
    assert follow(count(anywhere), "no <think>123456") == "no <think>123</think>456"


def test_several_sections_share_the_limit():
    limit = ReasoningLimit(1 + len(tokens_of("</b>")), ("<a>",), ("</a>", "</b>"), first=False)
    assert follow(count(limit), "x<a>1</b>y<a>") == "x<a>1</b>y<a></a>"


def test_a_marker_is_never_forced_within_a_character():
    assert len(tokens_of("☃")) == 3
    assert follow(count(ReasoningLimit(1, *THINK, opened=True)), "☃☃") == "☃</think>☃"


def test_a_token_that_was_not_forced_makes_no_difference():
    """As where a restriction of the request's own has left no other."""
    counted = count(ReasoningLimit(1, *THINK, opened=True))
    for token in tokens_of("a</thX"):
        counted.consume(token)
    assert counted.forced == tokens_of("<")[0]
    assert follow(counted, "") == "</think>"


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_markers_that_are_tokens_begin_and_end_the_count_of_a_sequence(special):
    """As Qwen's, which are not special; grammars know such tokens by other names."""
    tokenizer = with_special_tokens(["<think>", "</think>"], special)
    made = Compiler(tokenizer.backend.to_str, tokenizer.vocab_size, [tokenizer.eos_token_id])
    limit = replace(ANY_TEXT, reasoning=ReasoningLimit(3, *THINK))
    long, short = made.follow(limit), made.follow(limit)
    long.consume(tokens_of("<think>123", tokenizer))
    assert long.forced == tokenizer.backend.token_to_id(END)
    for token in tokens_of("<think>1</think>23456789", tokenizer):
        short.consume([token])
        assert short.forced is None
    made.close()


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(PLAIN.backend.to_str, PLAIN.vocab_size, [PLAIN.eos_token_id])
    yield made
    made.close()


def limited(constraint: Constraint, tokens: int) -> Constraint:
    return replace(constraint, reasoning=ReasoningLimit(tokens, *THINK, opened=True))


def allowed(matchers: Matchers, slot: int) -> set[int] | None:
    """What may be drawn; None for anything."""
    (_, words, ending), failures = matchers.allowed(np.array([slot]))
    assert not failures
    assert not ending[0]
    if (words == -1).all():
        return None
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return set(np.flatnonzero(bits[0]).tolist())


def draw(matchers: Matchers, slot: int, text: str) -> None:
    for token in tokens_of(text):
        matchers.note(np.array([slot]), torch.tensor([token]))


def test_masks_allow_all_then_the_marker_then_all(matchers):
    matchers.admit(entry(1, (5, 6), prompt_tokens=2, structured_outputs=limited(ANY_TEXT, 2)))
    assert allowed(matchers, 1) is None
    draw(matchers, 1, "12")
    for token in tokens_of(END):
        assert allowed(matchers, 1) == {token}
        matchers.note(np.array([1]), torch.tensor([token]))
    assert allowed(matchers, 1) is None


def test_the_grammar_of_the_answer_follows_the_forced_end(matchers):
    number = replace(as_constraint({"regex": "[0-9]+;"}), after=END)
    matchers.admit(entry(1, (5, 6), prompt_tokens=2, structured_outputs=limited(number, 2)))
    draw(matchers, 1, "12")
    assert allowed(matchers, 1) == set(tokens_of("<"))
    draw(matchers, 1, END)
    assert allowed(matchers, 1) == set(tokens_of("0123456789"))


def test_a_sequence_that_comes_back_has_used_what_it_has_used(matchers):
    *said, following = tokens_of("12") + tokens_of(END)
    made = limited(ANY_TEXT, len(tokens_of("12")))
    matchers.admit(entry(1, (5, 6, *said), prompt_tokens=2, structured_outputs=made))
    assert allowed(matchers, 1) == {following}


def test_one_grammar_is_compiled_once_for_all_limits(compiler):
    before = compiler.remembered
    number = as_constraint({"regex": "[0-9]{7}"})
    for tokens in range(5):
        compiler.check(limited(number, tokens))
    assert compiler.remembered == before + 1
    assert compiler.is_complete(limited(ANY_TEXT, 1), "anything")
    assert limited(number, 1).digest != limited(number, 2).digest != number.digest
