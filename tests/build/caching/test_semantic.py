"""What of the semantic cache is refused at the start, and that it serves through the whole server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.build.server import build_app
from headrace.compute.encoder.sentences import Sentences
from headrace.compute.model.spec import ModelError
from headrace.config import ConfigError, options
from headrace.core.cache.semantic.bounds import Tally
from headrace.core.cache.semantic.calibration import Calibration, Stratum
from headrace.core.cache.semantic.score import Curve, Score
from tests.serve.cache.semantic.scenes import Words

COSINE = Score(0.0, (("cosine", Curve((0.0, 1.0), (0.0, 1.0))),))
STOPS = list(range(200))
"""Whatever token comes first: the answer stops of itself, as only whole answers are kept for near questions."""

PROVED = Calibration(
    "words@1", (Stratum(0, COSINE, (Tally(0.8, 300, 0),), (Tally(0.8, 700, 1),), 1000, 2000),)
)


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Sentences, "from_name", lambda name: Words())
    file = tmp_path / "calibration.json"
    file.write_text(PROVED.to_text())
    return file


def build(**given: object) -> object:
    return build_app(options({"model": "builtin-draft", "response_cache": ("memory",), **given}))


def test_near_questions_are_answered_over_http(calibration: Path, tmp_path: Path) -> None:
    async def ask(client: httpx.AsyncClient, content: str) -> httpx.Response:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "stop_token_ids": STOPS,
        }
        done = await client.post("/v1/chat/completions", json=body | {"temperature": 0})
        assert done.status_code == 200, done.text
        return done

    async def stats(client: httpx.AsyncClient, ready: Callable[[Any], bool]) -> Any:
        """The semantic cache's, once they are so: it learns in the background."""
        until = time.monotonic() + 60.0
        while not ready(layer := (await client.get("/v1/cache/stats")).json()["layers"]["semantic"]):
            assert time.monotonic() < until, layer
            await asyncio.sleep(0.01)
        return layer

    async def run() -> None:
        store = f"sqlite:{tmp_path / 'answers'}"
        given = {
            "semantic_cache": "serve",
            "semantic_calibration": str(calibration),
            "semantic_deadline": 60.0,  # on a busy machine no miss is to come of a late look-up
            "response_cache_timeout": 60.0,
        }
        app, running = build(response_cache=(store,), served_model_name="m", semantic_audit=0.0, **given)
        async with (
            running,
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://s") as client,
        ):
            first = await ask(client, "shoes of red leather")
            assert first.headers["x-headrace-cache"] == "miss"
            await stats(client, lambda layer: layer["stores"]["memory"]["entries"] >= 1)
            near = await ask(client, "shoes of red leather and blue laces")
            note = near.headers["x-headrace-cache"]
            assert note.startswith("hit; layer=semantic; age=")
            assert "similarity=0." in note
            assert (await stats(client, lambda layer: layer["hits"]))["hits"] == 1
            scraped = (await client.get("/metrics")).text
            assert 'response_cache_hits_total{layer="semantic",model_name="m"} 1.0' in scraped

    asyncio.run(run())
    assert (tmp_path / "answers.semantic").exists()


def test_the_packaged_encoder_and_a_short_deadline_do_not_hinder_a_start(calibration: Path) -> None:
    build(semantic_cache="shadow", semantic_calibration=str(calibration))


def test_drafts_need_no_calibration(calibration: Path) -> None:
    build(semantic_cache="draft", speculative_config='{"method": ["ngram", "cached"]}')


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"response_cache": ()}, "needs a store for the responses"),
        ({"semantic_cache": "draft"}, "needs speculative decoding"),
        (
            {"semantic_cache": "draft", "speculative_config": '{"method": "ngram"}'},
            "needs speculative decoding",
        ),
        ({"semantic_calibration": None}, "needs a calibration"),
        ({"semantic_calibration": "gone.json"}, "gone.json"),
        ({"semantic_max_error": 0.001}, "cannot prove that at most 0.001"),
    ],
)
def test_what_cannot_keep_its_promise_does_not_start(
    calibration: Path, given: dict[str, object], message: str
) -> None:
    asked = {"semantic_cache": "serve", "semantic_calibration": str(calibration), **given}
    with pytest.raises(ConfigError, match=message):
        build(**asked)


def test_a_calibration_of_another_encoder(calibration: Path) -> None:
    calibration.write_text(json.dumps(json.loads(PROVED.to_text()) | {"encoder": "other@2"}))
    with pytest.raises(ConfigError, match="made with the encoder other@2, not with words@1"):
        build(semantic_cache="serve", semantic_calibration=str(calibration))


def test_an_encoder_that_cannot_be_had(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModelError(f"no {name} here")

    monkeypatch.setattr(Sentences, "from_name", missing)
    with pytest.raises(ConfigError, match="--semantic-encoder: no all-MiniLM-L6-v2 here"):
        build(semantic_cache="serve", semantic_calibration=str(calibration))
