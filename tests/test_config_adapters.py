"""Options of LoRA adapters."""

from __future__ import annotations

import pytest

from headrace.config import AdapterOptions, ConfigError, Options, check_adapters, options, read_modules
from headrace.wiring.embedding import load_pooling


def test_modules_are_names_and_folders_or_objects() -> None:
    based = '{"name": "code", "path": "/a/code", "base_model_name": "fox"}'
    given = options({"lora_modules": ["sql=/a/sql=2", '{"name": "chat", "path": "/a/chat"}', based]})
    assert read_modules(given.server.lora_modules) == [
        ("sql", "/a/sql=2", ""),
        ("chat", "/a/chat", ""),
        ("code", "/a/code", "fox"),
    ]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["sql"], "expected NAME=FOLDER, or a JSON object with name and path, got 'sql'"),
        (["=/a"], "expected NAME=FOLDER"),
        (["sql="], "expected NAME=FOLDER"),
        (["{"], "is not JSON"),
        (['{"name": "a"}'], "expected NAME=FOLDER"),
        (['{"name": 1, "path": "/a"}'], "expected NAME=FOLDER"),
        (['{"name": "a", "path": "/a", "rank": 1}'], "unknown keys rank"),
        (['{"name": "a", "path": "/a", "base_model_name": 1}'], "expected NAME=FOLDER"),
        (["a=/a", "a=/b"], "the name 'a' stands twice"),
    ],
)
def test_modules_that_are_neither(modules: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_modules(modules)
    assert message in str(refused.value)


def test_options_need_each_other() -> None:
    check_adapters(AdapterOptions(), ())
    check_adapters(AdapterOptions(enable_lora=True, max_loras=4, max_cpu_loras=4), ("a=/a",))
    for given, modules, message in (
        (AdapterOptions(max_lora_rank=8), (), "--max-lora-rank needs --enable-lora"),
        (AdapterOptions(), ("a=/a",), "--lora-modules needs --enable-lora"),
        (
            AdapterOptions(enable_lora=True, max_loras=4, max_cpu_loras=3),
            (),
            "--max-cpu-loras 3 is less than",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_adapters(given, modules)


def test_a_server_without_generation_takes_none() -> None:
    given = options({"enable_lora": True, "runner": "pooling"})
    assert isinstance(given, Options)
    with pytest.raises(ConfigError, match="--enable-lora: models of embeddings"):
        load_pooling(given)
