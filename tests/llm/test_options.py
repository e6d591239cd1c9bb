"""The typed keyword arguments are those of the configuration."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path

from headrace.config import PARTS
from headrace.llm.options import LLMOptions

SCRIPT = Path(__file__).parents[2] / "scripts" / "llm_options.py"


def test_the_file_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("llm_options", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text(encoding="utf-8") == module.source(), "run python scripts/llm_options.py"


def test_every_option_of_the_engine_is_there_and_none_of_the_server() -> None:
    parts = ("model", "cache", "scheduler", "cost", "adapters", "embedding", "images")
    names = {each.name for part in parts for each in fields(PARTS[part])}
    assert set(LLMOptions.__annotations__) == names - {"model"}
