"""Images where the engine has a process of its own, with one front end and with two: everything as in one process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.image_text import data_url
from tests.llm.test_images import file, made_llava, url_part, user
from tests.server.conftest import Server, serving

pytestmark = pytest.mark.slow

IMAGE_TOKENS = 4
"""Positions of an image of this model."""
FLAGS = ["--max-model-len", "120", "--dtype", "float32", "--block-size", "4", "--max-image-pixels", "10000"]
FLAGS += ["--limit-mm-per-prompt", "image=3", "--no-access-log"]
CONVERSATIONS = [
    user("w1", url_part(1), "w2", url_part(2)),
    user(url_part(3, detail="low"), "w9"),
    [
        {"role": "system", "content": "w4"},
        *user(url_part(2), "w1"),
        {"role": "assistant", "content": "w2"},
        *user(url_part(1)),
    ],
    user("w1"),
]
REFUSED = {
    "no image": user({"type": "image_url", "image_url": {"url": data_url(b"no image")}}),
    "cut off": user(url_part(1), {"type": "image_url", "image_url": {"url": data_url(file(1)[1][:90])}}),
    "too many": user(*[url_part(1)] * 4),
    "a URL": user({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_llava(tmp_path_factory)


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Server]:
    with serving(str(folder), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module", params=["1", "2"])
def divided(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(str(folder), *FLAGS, "--engine-process", "--api-server-count", request.param) as running:
        yield running


def asked(messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}


def engine_of(server: Server) -> int:
    """The process of the engine, among the children of the server's."""
    pid = server.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"headrace.wiring.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("there is no engine")


def streamed(server: Server, body: dict[str, Any]) -> str:
    text = server.post("/v1/chat/completions", body | {"stream": True}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return "".join(
        choice["delta"].get("content", "") for each in events for choice in json.loads(each)["choices"]
    )


def test_texts_usage_and_prefixes_are_those_of_one_process(one: Server, divided: Server) -> None:
    names = ("mm_cache_queries_total", "mm_cache_hits_total")
    before = [[each.metric(name) for name in names] for each in (one, divided)]
    first, second = (f"{number} {divided.url}" for number in range(2))
    for salt in (first, first, second):  # the second time from the prefix cache
        for messages in CONVERSATIONS:
            body = asked(messages, cache_salt=salt, return_token_ids=True)
            here, there = (each.post("/v1/chat/completions", body).json() for each in (one, divided))
            assert there["choices"] == here["choices"]
            assert there["usage"] == here["usage"]
    for messages in CONVERSATIONS:
        body = asked(messages, cache_salt=second)
        assert streamed(divided, body) == streamed(one, body) != ""
    here, there = (
        [each.metric(name) - count for name, count in zip(names, counts, strict=True)]
        for each, counts in zip((one, divided), before, strict=True)
    )
    assert there == here
    assert min(here) > 0
    assert divided.metric("image_encoder_seconds_total") > 0
    assert divided.metric("mm_cache_bytes") > 0


@pytest.mark.parametrize("name", REFUSED)
def test_images_are_refused_as_in_one_process(one: Server, divided: Server, name: str) -> None:
    here, there = (each.post("/v1/chat/completions", asked(REFUSED[name])) for each in (one, divided))
    assert there.status_code == here.status_code == 400
    assert there.json() == here.json()


def test_a_model_that_takes_images_says_so(one: Server, divided: Server) -> None:
    names = ("input_modalities", "image_limits")
    here, there = (each.get("/v1/models").json()["data"][0] for each in (one, divided))
    assert [there[name] for name in names] == [here[name] for name in names]


def test_clients_that_leave_at_any_time_leave_nothing(divided: Server) -> None:
    for number in range(10, 20):
        with suppress(httpx.TimeoutException):
            httpx.post(
                divided.url + "/v1/chat/completions",
                json=asked(user(url_part(number), url_part(number + 20)), max_tokens=80),
                timeout=httpx.Timeout(30, read=0.005 * (number - 9)),
            )
    divided.wait_until(lambda info: info["open_requests"] == 0)
    assert divided.post("/v1/chat/completions", asked(CONVERSATIONS[0])).status_code == 200


def test_an_engine_that_is_killed_computes_images_again_until_there_is_none(
    one: Server, divided: Server
) -> None:
    """The last test of this server: it computes nothing afterwards."""
    body = asked(CONVERSATIONS[0], max_tokens=100, cache_salt="killed")
    ended, steps = list[httpx.Response](), divided.get("/server_info").json()["steps"]
    waiting = threading.Thread(target=lambda: ended.append(divided.post("/v1/chat/completions", body)))
    waiting.start()
    divided.wait_until(lambda info: info["steps"] > steps + 3)
    os.kill(engine_of(divided), signal.SIGKILL)
    encoded = asked(user("w3", url_part(5)))  # while another process loads
    assert streamed(divided, encoded) == streamed(one, encoded)
    waiting.join(60)
    assert ended[0].json()["choices"] == one.post("/v1/chat/completions", body).json()["choices"]
    for number in range(2):
        os.kill(engine_of(divided), signal.SIGKILL)
        again = asked(user(url_part(7 + number)))
        assert divided.post("/v1/chat/completions", again).status_code == 200
    os.kill(engine_of(divided), signal.SIGKILL)
    for messages in (user(url_part(6)), CONVERSATIONS[3]):
        failed = divided.post("/v1/chat/completions", asked(messages, cache_salt="later"))
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
    assert divided.stop() == 0
