"""Defaults of sampling parameters from a model's files, with vLLM's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config.objects import GENERATION_FIELDS
from headrace.core.request import SamplingParams
from headrace.service.sampling_defaults import DefaultsError, SamplingDefaults, read_defaults


def folder(path: Path, **fields: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"max_new_tokens": 512}, {"max_tokens": 512}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),  # as vLLM, which ignores do_sample
        ({"temperature": 0, "top_k": 0}, {"temperature": 0, "top_k": 0}),
        ({"top_p": None, "num_beams": 4, "max_length": 9, "eos_token_id": [1]}, {}),
    ],
)
def test_the_fields_of_the_file_that_apply(tmp_path: Path, stored: Any, expected: Any) -> None:
    assert read_defaults(folder(tmp_path, **stored), "auto", {}).params == SamplingParams(**expected)
    assert read_defaults(folder(tmp_path, **stored), "vllm", {}) == SamplingDefaults()


def test_a_folder_without_the_file_has_neutral_defaults(tmp_path: Path) -> None:
    defaults = read_defaults(tmp_path, "auto", {})
    assert defaults == SamplingDefaults()
    assert defaults.describe() == ""


def test_overrides_count_more_than_the_file_and_null_removes_a_value(tmp_path: Path) -> None:
    folder(tmp_path, temperature=0.6, top_p=0.9, top_k=20)
    overrides = {"temperature": 0.1, "top_k": None, "max_new_tokens": 8}
    defaults = read_defaults(tmp_path, "auto", overrides)
    assert defaults.params == SamplingParams(temperature=0.1, top_p=0.9, max_tokens=8)
    assert defaults.describe() == (
        f"temperature 0.1, top_p 0.9, max_new_tokens 8 ({tmp_path}/generation_config.json and"
        " --override-generation-config)"
    )
    assert read_defaults(tmp_path, "vllm", overrides).params == SamplingParams(temperature=0.1, max_tokens=8)


def test_the_limit_of_all_outputs_comes_from_a_named_file_or_an_override(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for each, length in ((model, 100), (other, 50)):
        each.mkdir()
        folder(each, max_new_tokens=length)
    assert read_defaults(model, "auto", {}).most_tokens is None
    assert read_defaults(model, "auto", {"max_new_tokens": 7}).most_tokens == 7
    for named in (other, other / "generation_config.json"):
        found = read_defaults(model, str(named), {})
        assert (found.params.max_tokens, found.most_tokens) == (50, 50)
    assert read_defaults(model, str(other), {"max_new_tokens": None}).most_tokens is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"temperature": -1},
            r"generation_config\.json: temperature must be between 0 and 100, got -1; --overr",
        ),
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"temperature": float("nan")}, "temperature must be between 0 and 100, got nan"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"top_k": 2**40}, "top_k must be at most"),
        ({"min_p": True}, "min_p must be a number, got True"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": [1]}, "max_new_tokens must be an integer"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_source(tmp_path: Path, fields: Any, message: str) -> None:
    folder(tmp_path, **fields)
    with pytest.raises(DefaultsError, match=message) as raised:
        read_defaults(tmp_path, "auto", {})
    assert "\n" not in str(raised.value)
    with pytest.raises(DefaultsError, match=r"^--override-generation-config: "):
        read_defaults(tmp_path, "vllm", fields)
    assert read_defaults(tmp_path, "vllm", {}) == SamplingDefaults()
    assert read_defaults(tmp_path, "auto", dict.fromkeys(fields)) == SamplingDefaults()


@pytest.mark.parametrize("value", ["x" * 300_000, ["x" * 300_000], {"x" * 300_000: 1}, 10**4000, -(10**4000)])
def test_a_long_value_is_named_in_a_short_line(tmp_path: Path, value: Any) -> None:
    for name in GENERATION_FIELDS:
        folder(tmp_path, **{name: value})
        with pytest.raises(DefaultsError, match=f"generation_config.json: {name} must be ") as raised:
            read_defaults(tmp_path, "auto", {})
        assert len(str(raised.value)) < 500
        assert "ignores the file" in str(raised.value)


@pytest.mark.parametrize("text", ["[", "[1]", "3"])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(DefaultsError, match=r"generation_config\.json"):
        read_defaults(tmp_path, "auto", {})


def test_a_named_source_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DefaultsError, match=r"--generation-config /nowhere: there is no file /nowhere"):
        read_defaults(tmp_path, "/nowhere", {})
    with pytest.raises(DefaultsError, match=r"there is no file .*/generation_config\.json"):
        read_defaults(tmp_path, str(tmp_path), {})
