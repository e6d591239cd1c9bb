"""The estimate of the caches against the caches: a server with the same requests has the estimated hits."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.sentences import Sentences
from headrace.config import ConfigError, options
from headrace.core.events import Layer
from headrace.lab.simulate.runner import StepWork
from headrace.response_cache.rules.calibration import Calibration, Stratum, Tally
from headrace.response_cache.rules.judge import Curve, Score
from headrace.wiring.estimate import Assumed, Estimated, SharedDevice, estimate
from headrace.wiring.server import build_app
from tests.response_cache.semantic.scenes import Words

COSINE = Score(0.0, (("cosine", Curve((0.0, 1.0), (0.0, 1.0))),))
PROVED = Calibration(
    "words@1", (Stratum(0, COSINE, (Tally(0.8, 300, 0),), (Tally(0.8, 700, 1),), 1000, 2000),)
)
STOPS = list(range(200))
"""Whatever token comes first: the answer stops of itself, as only whole answers are kept for similar requests."""

GIVEN = {"model": "builtin-draft", "served_model_name": "m", "block_size": 8}


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4} | more


def log(folder: Path, bodies: list[dict[str, Any]]) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


AS_LOGGED = Assumed()


def estimated(path: Path, assumed: Assumed = AS_LOGGED, **given: object) -> Estimated:
    return estimate(path, options(GIVEN | given), None, assumed, lambda number: None)


async def served(bodies: list[dict[str, Any]], stored: bool = False, **given: object) -> dict[str, Any]:
    """What a server's caches did on these requests, sent one after the other: ``layers`` of its statistics.

    ``stored``: wait after each request until the semantic cache has indexed it.
    """
    app, running = build_app(options(GIVEN | {"response_cache": ("memory",)} | given))
    transport, indexed = httpx.ASGITransport(app=app), 0
    async with running, httpx.AsyncClient(transport=transport, base_url="http://s") as client:
        for body in bodies:
            done = await client.post(
                "/v1/chat/completions" if "messages" in body else "/v1/completions", json=body
            )
            assert done.status_code == 200, done.text
            if stored:
                ended = done.json()["choices"][0]["finish_reason"] == "stop"  # others are not indexed
                indexed += ended and done.headers["x-headrace-cache"] == "miss"
                await _indexed(client, indexed)
        stats = (await client.get("/v1/cache/stats")).json()
    layers: dict[str, Any] = stats["layers"]
    return layers


async def _indexed(client: httpx.AsyncClient, count: int) -> None:
    for _ in range(3000):
        layers = (await client.get("/v1/cache/stats")).json()["layers"]
        if layers["semantic"]["stores"]["memory"]["entries"] == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(layers)


def compare(found: Estimated, layers: dict[str, Any], *kinds: Layer) -> None:
    for layer in kinds:
        saved, real = found.tally.saved[layer], layers[layer.value]
        assert saved.requests == real["hits"], layer
        assert saved.prompt_tokens == real["saved_prompt_tokens"], layer


def test_the_server_has_the_hits_that_were_estimated(tmp_path: Path) -> None:
    """Repeats, other lengths, samples with and without a seed, completions, common beginnings, several choices."""
    draw = random.Random(4)
    system = {"role": "system", "content": "You sell bread and know all about wheat, rye, spelt and yeast."}
    bodies = []
    for _ in range(40):
        number = draw.randrange(8)
        body = chat(f"What does loaf number {number} cost?", max_tokens=draw.choice((3, 4)))
        body["messages"].insert(0, system)
        body |= draw.choice(({}, {}, {"temperature": 1, "seed": 5}, {"temperature": 1}, {"n": 2}))
        bodies.append(body)
    bodies += [{"prompt": "A loaf of bread", "temperature": 0, "max_tokens": 3}] * 3
    bodies += [chat("a pool", temperature=1, response_cache={"samples": 2})] * 4
    bodies += [chat("not stored", response_cache={"no_store": True})] * 2
    found = estimated(log(tmp_path, bodies))
    layers = asyncio.run(served(bodies))
    assert found.requests == len(bodies)
    assert found.tally.saved[Layer.EXACT].requests > 10
    assert found.tally.saved[Layer.COALESCED].requests >= 1  # the two greedy choices of one call
    assert found.tally.bypassed["sampled without a seed"].repeats > 0
    compare(found, layers, Layer.EXACT, Layer.COALESCED, Layer.PREFIX)


def test_the_prefix_cache_alone_is_that_of_a_server_without_the_others(tmp_path: Path) -> None:
    bodies = [chat(f"The price of loaf number {number % 3} is asked.") for number in range(9)]
    alone = estimated(log(tmp_path, bodies)).tally.prefix_alone
    layers = asyncio.run(served(bodies, response_cache=()))
    assert alone.requests == layers["prefix"]["hits"] > 0
    assert alone.prompt_tokens == layers["prefix"]["saved_prompt_tokens"]


def test_equal_requests_at_the_same_time_are_coalesced(tmp_path: Path) -> None:
    bodies = [chat("What does a loaf cost?")] * 5 + [chat("And a roll?")] * 3
    path = log(tmp_path, [{"body": body, "timestamp": 7, "seconds": 1} for body in bodies])

    async def at_once() -> Any:
        app, running = build_app(options(GIVEN | {"response_cache": ("memory",)}))
        transport = httpx.ASGITransport(app=app)
        async with running, httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
            return (await client.get("/v1/cache/stats")).json()["layers"]

    found, layers = estimated(path), asyncio.run(at_once())
    assert found.tally.saved[Layer.COALESCED].requests == 6
    saved = [found.tally.saved[layer] for layer in (Layer.EXACT, Layer.COALESCED)]
    real = [layers[layer.value] for layer in (Layer.EXACT, Layer.COALESCED)]
    assert sum(each.requests for each in saved) == sum(each["hits"] for each in real)
    assert sum(each.prompt_tokens for each in saved) == sum(each["saved_prompt_tokens"] for each in real)


def test_similar_requests_of_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sentences, "from_name", lambda name: Words())
    calibration = tmp_path / "calibration.json"
    calibration.write_text(PROVED.to_text())
    texts = [
        "shoes of red leather",
        "shoes of nice red leather",
        "a loaf of bread",
        "shoes of red leather",
    ]
    bodies = [chat(text, stop_token_ids=STOPS, max_tokens=30) for text in texts]
    semantic = {"semantic_calibration": str(calibration)}
    found = estimated(log(tmp_path, bodies), **semantic)
    patient = {"semantic_deadline": 60.0, "response_cache_timeout": 60.0, "semantic_audit": 0.0}
    layers = asyncio.run(served(bodies, stored=True, semantic_cache="serve", **semantic, **patient))
    assert found.near.certified
    assert found.tally.saved[Layer.SEMANTIC].requests == 1
    compare(found, layers, Layer.EXACT, Layer.SEMANTIC)


def test_without_a_calibration_it_is_an_upper_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sentences, "from_name", lambda name: Words())
    texts = ("shoes of red leather", "shoes of nice red leather", "shoes of 2 red leathers")
    path = log(tmp_path, [chat(text) for text in texts])
    found = estimated(path, Assumed(min_similarity=0.6))
    assert not found.near.certified
    assert found.tally.near.requests == 1  # a guard rejects the number
    assert found.tally.together().output_tokens == 0.0
    assert estimated(path, Assumed(min_similarity=0.99)).tally.near.requests == 0


def test_without_an_encoder_near_duplicates_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Sentences:
        raise ModelError("there is no encoder")

    monkeypatch.setattr(Sentences, "from_name", missing)
    path = log(tmp_path, [chat("a"), chat("a")])
    found = estimated(path)
    assert found.near.missing == "there is no encoder"
    assert found.tally.saved[Layer.EXACT].requests == 1
    with pytest.raises(ConfigError, match="--semantic-encoder: there is no encoder"):
        estimated(path, semantic_encoder="none")


def test_lines_that_the_server_would_refuse_are_left_out_with_their_numbers(tmp_path: Path) -> None:
    path = log(tmp_path, [chat("a"), chat("b", temperature=-1), chat("c", unknown_field=1), chat("d")])
    path.write_text(path.read_text() + "{broken\n" + json.dumps({"url": "/v1/embeddings", "body": {}}) + "\n")
    found = estimated(path)
    assert (found.requests, found.left_out) == (2, 4)
    assert [each.line for each in found.problems] == [2, 3, 5, 6]
    assert "unknown_field" in found.problems[1].message
    path.write_text("{broken\n[]\n")
    with pytest.raises(ConfigError, match=r"no request could be used, 2 lines are wrong; first: line 1"):
        estimated(path)


def test_tenants_and_models_share_nothing(tmp_path: Path) -> None:
    bodies = [chat("a", user="x"), chat("a", user="y"), chat("a", user="x", model="other")]
    assert estimated(log(tmp_path, bodies)).tally.saved[Layer.EXACT].requests == 0
    one = estimated(log(tmp_path, bodies), Assumed(tenant="us"))
    assert one.tally.saved[Layer.EXACT].requests == 1


class Linear:
    """A device whose step takes a second, and a hundredth more per token."""

    def seconds(self, work: StepWork) -> float:
        return 1.0 + 0.01 * work.tokens

    def host_seconds(self, work: StepWork) -> float:
        return 0.0


def test_a_prompt_takes_what_it_adds_to_a_step_and_an_output_its_part() -> None:
    alone, shared = SharedDevice(Linear(), 1), SharedDevice(Linear(), 4)
    assert alone.seconds(100, 0, 1) == pytest.approx(2.0)
    assert shared.seconds(100, 0, 1) == pytest.approx(1.0 + 0.01 * 103 - (1.0 + 0.03))
    assert shared.seconds(100, 0, 1) - shared.seconds(100, 60, 1) == pytest.approx(0.6)
    assert shared.seconds(100, 100, 5) == pytest.approx(4 * 1.04 / 4)
    assert shared.latency(100, 5) == pytest.approx(1.0 + 4 * 1.04)
