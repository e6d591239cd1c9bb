"""Where a model cannot sleep, and why."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headrace import build_app
from headrace.compute.adapters.layout import adapter_layout
from headrace.compute.model.hub import resolve_model
from headrace.compute.model.weights import read_spec
from headrace.config import ConfigError, options
from headrace.service.sleep import Part
from headrace.wiring.generation import refused_parts
from tests.doubles.adapters import write_adapter


def refused(
    *, kind: str = "cpu", states: int = 0, pooling: tuple[str, ...] = (), **given: Any
) -> dict[Part, str]:
    shape = SimpleNamespace(state_bytes=states, architecture="Lfm2ForCausalLM")
    loaded: Any = SimpleNamespace(name="fox", facts=SimpleNamespace(kind=kind), shape=shape)
    return refused_parts(loaded, options(given), pooling)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "cuda"}, "a GPU"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        (
            {
                "kv_transfer_config": '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 1}'
            },
            "--kv-transfer-config",
        ),
        ({"record_trace": "trace.db"}, "--record-trace"),
    ],
)
def test_nothing_sleeps(given: dict[str, Any], named: str) -> None:
    found = refused(**given)
    assert found.keys() == set(Part)
    assert all(named in why for why in found.values())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"states": 64}, "Lfm2ForCausalLM"),
        ({"speculative_config": '{"method": "draft_model", "model": "builtin"}'}, "a draft model"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"pooling": ("other", "fox")}, "--embedding-model"),
    ],
)
def test_weights_stay(given: dict[str, Any], named: str) -> None:
    found = refused(**given)
    assert found.keys() == {Part.WEIGHTS}
    assert named in found[Part.WEIGHTS]


def test_a_plain_model_sleeps() -> None:
    assert refused(pooling=("other",), speculative_config='{"method": "ngram"}') == {}


GIVEN = {"model": "builtin-draft", "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}
LAYOUT = adapter_layout(read_spec(resolve_model("builtin-draft")))
SIZES = {name: (each.outputs, each.inputs) for name, each in LAYOUT.modules.items()}
SAID = [{"role": "user", "content": "Tell me a story about a fox."}]


async def served(calls: Any, **given: Any) -> Any:
    app, running = build_app(options(GIVEN | {"enable_lora": True} | given))
    async with running:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await calls(client)


async def chat(client: httpx.AsyncClient, model: str, **more: Any) -> tuple[str, str]:
    """The text of an answer, and whether it came from the response cache."""
    body = {"model": model, "messages": SAID, "max_tokens": 8, "temperature": 0} | more
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text, answer.headers.get("X-Headrace-Cache", "")


def test_adapters_have_names_and_share_no_cached_answer(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", SIZES, seed=1, size=3.0)
    two = write_adapter(tmp_path / "two", SIZES, seed=2, size=3.0)

    async def calls(client: httpx.AsyncClient) -> None:
        texts = {}
        for model in ("builtin-draft", "one"):
            (texts[model], missed), (again, hit) = [await chat(client, model) for _ in range(2)]
            assert again == texts[model]
            assert missed.startswith("miss")
            assert hit.startswith("hit")
        load = {"lora_name": "one", "lora_path": str(two), "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
        text, found = await chat(client, "one")
        assert found.startswith("miss")
        assert len({text, *texts.values()}) == 3
        load["lora_path"] = str(one)
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
        assert await chat(client, "one") == (texts["one"], hit)
        models = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in models] == [
            ("builtin-draft", None),
            ("one", "builtin-draft"),
        ]
        assert 'lora_requests_info{max_lora="1"' in (await client.get("/metrics")).text

    module = json.dumps({"name": "one", "path": str(one), "base_model_name": "builtin-draft"})
    given = {"lora_modules": [module], "response_cache": ["memory"]}
    asyncio.run(served(calls, **given))


def test_an_adapter_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", SIZES, r=20)
    for modules, message in (
        ([f"a={tmp_path}/none"], "--lora-modules a=.*adapter_config.json cannot be read"),
        ([f"a={folder}"], "--lora-modules a=.*the rank 20 is above --max-lora-rank 16"),
        ([f"builtin-draft={folder}"], "that of a served model"),
        (
            [json.dumps({"name": "a", "path": str(folder), "base_model_name": "fox"})],
            "base_model_name 'fox' is not the served model, 'builtin-draft'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            build_app(options(GIVEN | {"enable_lora": True, "lora_modules": modules}))
