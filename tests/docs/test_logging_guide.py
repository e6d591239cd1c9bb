"""The guide to logs names every field, option and span attribute that the code has."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from headrace.api.operations.access_log import FIELDS
from headrace.config import ObservabilityOptions
from headrace.observe import tracing
from headrace.observe.tracing import NAMES, span_attributes

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "logging.md").read_text(encoding="utf-8")


def test_the_table_of_the_access_log_is_the_code_s() -> None:
    section = GUIDE.partition("## Access log")[2].partition("## Warnings")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)) == FIELDS


def test_the_sample_line_has_its_fields_in_order() -> None:
    (sample,) = re.findall(r"^\{.*\}$", GUIDE, re.MULTILINE)
    names = [name for name in json.loads(sample) if name in FIELDS]
    assert names == [name for name in FIELDS if name in names]
    assert len(names) > 12


def test_every_option_is_described() -> None:
    for each in fields(ObservabilityOptions):
        flag = each.name.replace("_", "-")
        assert f"`--{flag}`" in GUIDE or f"`--no-{flag}`" in GUIDE


def test_every_attribute_is_described() -> None:
    made = span_attributes("/v1/completions", dict.fromkeys([*NAMES, "model", "finish_reason"], "x"))
    inner = re.findall(r'"((?:headrace|gen_ai)\.[\w.]+)"', Path(tracing.__file__).read_text())
    assert inner
    assert all(f"`{name}`" in GUIDE for name in [*made, *inner])
