"""A small vocabulary, its compiler, and the matchers of four slots."""

from __future__ import annotations

import pytest

from headrace.compute.grammar.compiler import Compiler
from headrace.compute.grammar.matchers import Matchers
from tests.text.vocabularies import byte_level

TOKENIZER = byte_level()
(END,) = TOKENIZER.eos_token_ids
SIZE = TOKENIZER.vocab_size + 5


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(TOKENIZER.backend.to_str, SIZE, [END])
    yield made
    made.close()


@pytest.fixture
def matchers(compiler):
    made = Matchers(compiler, 4)
    yield made
    made.close()
