"""Which use of a model the options mean, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest

from headrace.config import ConfigError, Options, options
from headrace.wiring.embedding import load_pooling, runs_pooling
from headrace.wiring.server import build_app
from tests.doubles.tiny_encoder import write_cross_encoder, write_embedding_model


def given(model: str | Path, **more: object) -> Options:
    return options({"model": str(model), **more})


def test_the_use_of_a_model(tmp_path: Path) -> None:
    encoder, cross = write_embedding_model(tmp_path / "a"), write_cross_encoder(tmp_path / "b")
    decoder = tmp_path / "decoder"
    decoder.mkdir()
    (decoder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert runs_pooling(given(encoder).model)
    assert runs_pooling(given(cross).model)
    assert runs_pooling(given("all-MiniLM-L6-v2").model)
    assert not runs_pooling(given("builtin").model)
    assert not runs_pooling(given(decoder).model)
    assert runs_pooling(given(decoder, runner="pooling").model)
    (decoder / "modules.json").write_text("[]")
    assert runs_pooling(given(decoder).model)
    assert not runs_pooling(given(decoder, runner="generate").model)
    with pytest.raises(ConfigError, match="does not exist"):
        runs_pooling(given("/nowhere").model)


def test_the_models_of_each_option(tmp_path: Path) -> None:
    encoder, cross = write_embedding_model(tmp_path / "a"), write_cross_encoder(tmp_path / "b")
    alone = load_pooling(given(encoder, served_model_name="words"))
    assert alone.embedding is not None
    assert alone.embedding.name == "words"
    assert alone.rerank is None
    both = load_pooling(given(cross, embedding_model=str(encoder)))
    assert [model.name for model in both.all()] == ["a", "b"]
    assert load_pooling(given("builtin")).all() == []
    assert (
        load_pooling(given("builtin", embedding_model="builtin")).all() == []
    )  # it has no weights of its own


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("a", {"embedding_model": "a"}, "--embedding-model: .*already the model for this"),
        ("b", {"rerank_model": "b"}, "--rerank-model: .*already the model for this"),
        ("builtin", {"rerank_model": "a"}, "--rerank-model: .*not a cross-encoder"),
        ("builtin", {"embedding_model": "/nowhere"}, "--embedding-model: model folder /nowhere"),
        ("builtin", {"rerank_model": "/nowhere"}, "--rerank-model: model folder /nowhere"),
    ],
)
def test_what_is_refused(model: str, more: dict[str, str], message: str, tmp_path: Path) -> None:
    folders = {"a": write_embedding_model(tmp_path / "a"), "b": write_cross_encoder(tmp_path / "b")}
    named = {name: str(folders.get(value, value)) for name, value in more.items()}
    with pytest.raises(ConfigError, match=re.compile(message)):
        load_pooling(given(folders.get(model, model), **named))


def test_an_application_without_a_model_that_generates(tmp_path: Path) -> None:
    app, running = build_app(given(write_embedding_model(tmp_path / "tiny")))

    async def use() -> None:
        transport = httpx.ASGITransport(app)
        async with running, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 404
            answer = await client.post("/v1/embeddings", json={"input": "a b"})
            assert len(answer.json()["data"][0]["embedding"]) == 8

    asyncio.run(use())
