"""What of the semantic cache is refused at the start, and that it serves through the whole server."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.api.cache import warm
from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.sentences import PairJudge, Sentences
from headrace.config import ConfigError, options
from headrace.response_cache.rules.calibration import Calibration, Stratum, Tally
from headrace.response_cache.rules.judge import Curve, Score
from headrace.wiring.server import build_app
from tests.doubles.tiny_encoder import write_cross_encoder
from tests.response_cache.semantic.scenes import Words

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


class Asking:
    """A client of a server with a semantic cache, and its statistics."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def ask(self, content: str, **headers: str) -> tuple[str, str]:
        """The note on the cache, and the id of the request."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "stop_token_ids": STOPS,
        }
        done = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert done.status_code == 200, done.text
        return done.headers["x-headrace-cache"], done.json()["id"]

    async def why(self, request_id: str) -> str | None:
        """Why the semantic cache did not answer it."""
        explained = await self.client.get(f"/v1/requests/{request_id}")
        assert explained.status_code == 200, explained.text
        reason: str | None = explained.json()["semantic_miss"]
        return reason

    async def until(self, path: str, ready: Callable[[Any], bool]) -> Any:
        """What ``path`` returns, once it is ``ready``: the server works in the background."""
        until = time.monotonic() + 60.0
        while not ready(found := (await self.client.get(path)).json()):
            assert time.monotonic() < until, found
            await asyncio.sleep(0.01)
        return found

    async def stored(self, entries: int) -> None:
        """Wait until so many requests are indexed."""
        await self.until(
            "/v1/cache/stats",
            lambda found: found["layers"]["semantic"]["stores"]["memory"]["entries"] >= entries,
        )

    async def reasons(self) -> str:
        """The metrics page."""
        return (await self.client.get("/metrics")).text


@asynccontextmanager
async def asking(calibration: Path, **given: object) -> AsyncIterator[Asking]:
    """A server whose lookups are never late, and a client."""
    patient: dict[str, object] = {
        "semantic_calibration": str(calibration),
        "semantic_deadline": 60.0,  # on a busy machine no miss is to come of a late look-up
        "response_cache_timeout": 60.0,
        "semantic_audit": 0.0,
        "served_model_name": "m",
    }
    app, running = build(semantic_cache="serve", **(patient | given))
    async with (
        running,
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://s") as client,
    ):
        yield Asking(client)


def test_near_questions_are_answered_over_http(calibration: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with asking(calibration, response_cache=(f"sqlite:{tmp_path / 'answers'}",)) as server:
            note, _ = await server.ask("shoes of red leather")
            assert note == "miss"
            await server.stored(1)
            note, _ = await server.ask("shoes of nice red leather")
            assert note.startswith("hit; layer=semantic; age=")
            assert "similarity=0." in note
            stats = await server.until("/v1/cache/stats", lambda found: found["layers"]["semantic"]["hits"])
            assert stats["layers"]["semantic"]["hits"] == 1
            scraped = await server.reasons()
            assert 'response_cache_hits_total{layer="semantic",model_name="m"} 1.0' in scraped

    asyncio.run(run())
    assert (tmp_path / "answers.semantic").exists()


def test_two_servers_share_their_rows_through_redis(calibration: Path, redis_port: int) -> None:
    shared = {"response_cache": (f"redis://127.0.0.1:{redis_port}/0",), "response_cache_secret": "secret"}

    async def run() -> None:
        async with asking(calibration, **shared) as one, asking(calibration, **shared) as other:
            await one.ask("shoes of red leather")
            await other.stored(1)
            note, _ = await other.ask("shoes of nice red leather")
            assert note.startswith("hit; layer=semantic")
            rows = (await one.client.get("/v1/cache/stats")).json()["semantic"]["shared_rows"]
            assert (rows["store"], rows["reachable"], rows["written"]) == ("redis", True, 1)
            note, _ = await other.ask("shoes of nice red leather", **{"X-Tenant-Id": "another"})
            assert note == "miss"
            await one.stored(2)
            cleared = await one.client.post("/v1/cache/clear", json={"scope": "all"})
            assert cleared.json()["stores"] == {"redis": True}
            await other.until(
                "/v1/cache/stats",
                lambda found: found["layers"]["semantic"]["stores"]["memory"]["entries"] == 0,
            )

    asyncio.run(run())


@pytest.mark.parametrize("agrees", [True, False])
def test_a_cross_encoder_must_agree(calibration: Path, tmp_path: Path, agrees: bool) -> None:
    folder = write_cross_encoder(tmp_path / "judge")
    judged = replace(PROVED.strata[0], judge_threshold=0.0 if agrees else 1.1)
    name = PairJudge.from_name(str(folder)).name
    calibration.write_text(Calibration("words@1", (judged,), name).to_text())

    async def run() -> None:
        async with asking(calibration, semantic_judge=str(folder)) as server:
            await server.ask("shoes of red leather")
            await server.stored(1)
            note, request_id = await server.ask("shoes of nice red leather")
            if agrees:
                assert note.startswith("hit; layer=semantic")
                return
            assert note == "miss"
            assert await server.why(request_id) == "judge_refused"
            assert 'reason="judge_refused"} 1.0' in await server.reasons()

    asyncio.run(run())


@pytest.mark.parametrize("agrees", [True, False])
def test_the_served_model_compares_pairs_in_idle_time(
    calibration: Path, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    monkeypatch.setattr(warm, "LEAST_ODDS", -math.inf if agrees else math.inf)
    monkeypatch.setattr("headrace.wiring.caches.SETTLE_SECONDS", 0.0)
    near = "shoes of nice red leather"

    async def run() -> None:
        async with asking(calibration, semantic_judge="self", warm_below_rate=1000.0) as server:
            await server.ask("shoes of red leather")
            await server.stored(1)
            note, first_id = await server.ask(near)
            assert note == "miss"
            assert await server.why(first_id) == "judge_pending"
            assert 'reason="judge_pending"} 1.0' in await server.reasons()
            await server.until("/v1/cache/warm", lambda found: found["computed"] >= 1)
            await server.stored(2)
            note, _ = await server.ask("shoes of the nice red leather")
            assert note.startswith("hit; layer=semantic"), "it says the same as the second one"
            wrong = {
                "id": first_id,
                "verdict": "wrong",
            }  # its own row is removed: the first one is the nearest again
            reported = await server.client.post("/v1/cache/feedback", json=wrong)
            assert reported.status_code == 200, reported.text
            await server.until(
                "/v1/cache/stats",
                lambda found: found["layers"]["semantic"]["stores"]["memory"]["entries"] == 1,
            )
            note, request_id = await server.ask("shoes of nice red leather please")
            if agrees:
                assert note.startswith("hit; layer=semantic")
            else:
                assert await server.why(request_id) == "judge_refused"

    asyncio.run(run())


def test_pairs_are_exported_labelled_and_imported(calibration: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with asking(calibration, semantic_labels=str(tmp_path / "labels")) as server:
            await server.ask("shoes of red leather")
            await server.stored(1)
            note, hit_id = await server.ask("shoes of nice red leather")
            assert note.startswith("hit; layer=semantic")
            explained = (await server.client.get(f"/v1/requests/{hit_id}")).json()
            assert explained["finish"]["certificate"] == "common"
            assert 'certified_hits_total{certificate="common"' in await server.reasons()
            exported = await server.client.get("/v1/cache/pairs")
            [line] = exported.text.splitlines()
            pair = json.loads(line)
            assert (pair["cached"], pair["asked"], pair["verdict"], pair["label"]) == (
                *("shoes of red leather", "shoes of nice red leather", "serve"),
                None,
            )
            assert (await server.client.get("/v1/cache/pairs?tenant=another")).text == ""
            good = json.dumps({**pair, "label": "same"})
            for bad, why in (
                (f"{line}\n{good}\n{{", "line 3: not JSON"),
                (json.dumps({**pair, "label": "same", "basis": "x"}), "line 1: basis: "),
                (f"{good}\n" + json.dumps({**pair, "label": "different"}), "line 2: id: "),
                (b"\xff", "line 1: not UTF-8"),
            ):
                refused = await server.client.post("/v1/cache/pairs", content=bad)
                assert refused.status_code == 400, refused.text
                assert refused.json()["error"]["message"].startswith(why)
            done = await server.client.post("/v1/cache/pairs", content=f"{line}\n\n{good}\n")
            assert done.json() == {"stored": 1, "others": 0, "without_label": 1}
            state = (await server.client.get("/v1/cache/stats")).json()["semantic"]
            [tenant] = state["tenants"].values()
            assert (tenant["labels"], tenant["sizes"][0]["certificate"]) == (1, "common")
            assert state["threshold"]["sizes"][0]["threshold"] == 0.8

    asyncio.run(run())


def test_labels_without_a_file_are_refused(calibration: Path) -> None:
    async def run() -> None:
        async with asking(calibration) as server:
            refused = await server.client.post("/v1/cache/pairs", content=b"{}")
            assert refused.status_code == 409
            assert "--semantic-labels" in refused.json()["error"]["message"]

    asyncio.run(run())


def test_a_threshold_by_hand_needs_no_calibration_and_says_that_nothing_is_known(calibration: Path) -> None:
    async def run() -> None:
        by_hand = {"semantic_calibration": None, "semantic_threshold": 0.85}
        async with asking(calibration, **by_hand) as server:
            await server.ask("shoes of red leather")
            await server.stored(1)
            note, hit_id = await server.ask("shoes of nice red leather")
            assert note.startswith("hit; layer=semantic")
            explained = (await server.client.get(f"/v1/requests/{hit_id}")).json()
            assert explained["finish"]["certificate"] == "by_hand"
            shown = (await server.client.get("/v1/cache/stats")).json()["semantic"]["threshold"]
            assert (shown["by"], shown["cosine"], shown["claims"]) == ("hand", 0.85, [])

    asyncio.run(run())


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
        ({"semantic_judge": "gone"}, "--semantic-judge: "),
        ({"semantic_labels": "/proc/none/labels"}, "--semantic-labels: "),
        (
            {
                "semantic_cache": "draft",
                "semantic_threshold": 0.9,
                "speculative_config": '{"method": ["ngram", "cached"]}',
            },
            "--semantic-threshold has no effect on drafts",
        ),
        (
            {
                "semantic_cache": "draft",
                "semantic_judge": "self",
                "speculative_config": '{"method": ["ngram", "cached"]}',
            },
            "no effect on drafts",
        ),
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


def test_a_calibration_of_another_judge(calibration: Path, tmp_path: Path) -> None:
    folder = str(write_cross_encoder(tmp_path / "judge"))
    with pytest.raises(
        ConfigError, match=r"made without a judge, not with judge@\w+: run headrace cache calibrate"
    ):
        build(semantic_cache="serve", semantic_calibration=str(calibration), semantic_judge=folder)
    judged = replace(PROVED.strata[0], judge_threshold=0.7)
    calibration.write_text(Calibration("words@1", (judged,), "other@2").to_text())
    with pytest.raises(ConfigError, match="made with the judge other@2, not with judge@"):
        build(semantic_cache="serve", semantic_calibration=str(calibration), semantic_judge=folder)
    for judge in (None, "self"):
        with pytest.raises(ConfigError, match="made with the judge other@2: name it with --semantic-judge"):
            build(semantic_cache="serve", semantic_calibration=str(calibration), semantic_judge=judge)


def test_an_encoder_that_cannot_be_had(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModelError(f"no {name} here")

    monkeypatch.setattr(Sentences, "from_name", missing)
    with pytest.raises(ConfigError, match="--semantic-encoder: no all-MiniLM-L6-v2 here"):
        build(semantic_cache="serve", semantic_calibration=str(calibration))
