"""A small part of the fuzz: answers validate, refusals have reasons, and the judge notices what is wrong."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.judges.posted_schemas import posted
from tests.judges.structured_fuzz import Case, Findings, generated, make_fuzz


@pytest.fixture(scope="module")
def fuzz():
    made, compiler = make_fuzz(seed=5)
    yield made
    compiler.close()


def test_random_answers_to_posted_and_generated_schemas_validate(fuzz):
    findings = Findings()
    for case in [*(Case(*each) for each in islice(posted(), 0, None, 7)), *generated(60, seed=11)]:
        fuzz.judge(case, 2, 250, findings)
    assert findings.wrong == []
    assert not findings.gave_up
    assert findings.complete > 80
    assert 0 < sum(findings.refused.values()) < findings.schemas / 2


def test_an_answer_that_does_not_validate_is_noticed(fuzz):
    findings = Findings()
    case = Case("broken", {"enum": [1, 2]}, [(1, False), (3, True)])
    fuzz.judge(case, 0, 9, findings)
    assert len(findings.wrong) == 1
    assert (findings.reached, findings.unreached) == (0, 1)
    enforced = fuzz._compiler.matcher
    fuzz._compiler.matcher = lambda constraint: enforced(type(constraint)(constraint.kind, '{"const": "x"}'))
    try:
        fuzz.judge(Case("other", {"type": "integer"}), 1, 50, findings)
    finally:
        del fuzz._compiler.matcher
    assert len(findings.wrong) == 2
