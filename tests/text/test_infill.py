"""Prompts for the text between a prefix and a suffix, by the markers that a vocabulary has."""

from __future__ import annotations

import pytest
import tokenizers

from headrace.text.infill import FAMILIES, Family, find_infill
from headrace.text.tokenizer import Tokenizer
from tests.text.vocabularies import SPECIAL_TOKENS, byte_fallback, byte_level


def knowing(family: Family, base: Tokenizer, ends: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(base.backend.to_str())
    markers = [family.prefix, family.suffix, family.middle]
    backend.add_special_tokens([*markers, *(family.ends if ends else ())])
    return Tokenizer(backend, SPECIAL_TOKENS)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_markers_stand_where_the_family_has_them(family):
    tokenizer = knowing(family, byte_level())
    infill = find_infill(tokenizer)
    prompt = tokenizer.decode(infill.prompt("def f(", "):\n", True), skip_special_tokens=False)
    assert prompt == f"{family.prefix}def f({family.suffix}):\n{family.middle}"
    assert [tokenizer.token(token) for token in infill.ends] == list(family.ends)
    assert find_infill(knowing(family, byte_level(), ends=False)).ends == ()


def test_a_first_token_stays_first_and_a_suffix_gets_no_space():
    family = FAMILIES[-1]
    tokenizer = knowing(family, byte_fallback())
    prompt = [tokenizer.token(token) for token in find_infill(tokenizer).prompt("a", "er", True)]
    assert prompt == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "er", "▁<MID>"]
    plain = [tokenizer.token(token) for token in find_infill(tokenizer).prompt([5], "er", True)]
    assert plain[0] == "▁<PRE>"


def test_a_model_without_markers_fills_nothing_in():
    assert find_infill(byte_level()) is None
