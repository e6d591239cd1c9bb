"""Random schemas and texts with an independent judge: what is accepted is valid, and no grammar has a dead end.

``--pairs`` sets how many; the schemas are the same in each run.
"""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from headrace.compute.grammar.sources import read_schema, schema_grammar
from tests.judges.structured_exactness import Fuzz, Judge, decoded


def test_what_is_accepted_is_valid_and_every_walk_comes_to_an_end(pytestconfig):
    found = Fuzz(seed=39).run(pytestconfig.getoption("--pairs"))
    assert found.unsound == []
    assert found.dead == []
    assert found.accepted > found.pairs / 3
    assert found.walked > found.schemas
    assert found.pairs >= pytestconfig.getoption("--pairs")
    assert found.unexplained == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ('{"maximum":12345678901234567890}', "12345678901234567891"),
        ('{"properties":{"a":{"type":"null"}}}', r'{"\u0061":1}'),
        ('{"minProperties":2,"properties":{"a":{},"b":{}}}', '{"a":1,"a":2}'),
        ('{"multipleOf":0.1}', "0.15"),
        ('{"type":"string","maxLength":1}', '"ab"'),
    ],
)
def test_the_judge_notices_what_is_wrong(schema, text):
    """Each text is accepted by a grammar that does not follow the schema."""
    fuzz = Fuzz(seed=1)
    lenient = LLMatcher(fuzz._tokenizer, LLMatcher.grammar_from_lark(r"start: /(.|\n)*/"), log_level=0)
    fuzz._judge(Judge(decoded(schema)), lenient, schema, text)
    assert fuzz.found.unsound == [(schema, text)]
    exact = LLMatcher(fuzz._tokenizer, schema_grammar(read_schema(schema)), log_level=0)
    assert not fuzz.accepts(exact, text)


def test_a_dead_end_is_noticed():
    fuzz = Fuzz(seed=1)
    dead = LLMatcher(
        fuzz._tokenizer, LLMatcher.grammar_from_lark('start: "a" NOTHING\nNOTHING: /x/ & /y/'), log_level=0
    )
    assert fuzz._walk(dead, "") is None
    assert fuzz.found.dead == [("", "a")]
