"""A third of transformers' model types: computed as transformers computes them, or refused with a reason.

`scripts/model_coverage.py` judges all of them and writes the record that this test compares with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.oracle.coverage import judge

RECORD = json.loads((Path(__file__).parents[2] / "docs" / "data" / "models.json").read_text())
THIRD = [each for each in RECORD["types"] if each["verdict"] != "not built"][::3]


@pytest.mark.parametrize("known", THIRD, ids=[f"{each['use']}-{each['kind']}" for each in THIRD])
def test_a_type_is_equal_or_refused_as_recorded(known: dict[str, str]) -> None:
    found = judge(known["kind"], known["use"])
    assert found.verdict == known["verdict"], found.why


def test_no_type_is_wrong() -> None:
    assert not [each["kind"] for each in RECORD["types"] if each["verdict"] == "wrong"]
