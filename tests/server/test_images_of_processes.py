"""Images where the engine has a process of its own, with one front end and with two: everything as in one process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
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

IMAGE_BYTES = 128 + 4 * (64 * 4 + 8 + 8)
"""What an image of this model takes in the cache: the head of its rows, and 4 positions with a row, an offset and a
token each. Its rows take a page of the file."""
PAGE = os.sysconf("SC_PAGE_SIZE")
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


def children(server: Server, program: str) -> list[int]:
    """The processes of a program among the children of the server's."""
    pid = server.process.pid
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found if program.encode() in Path(f"/proc/{each}/cmdline").read_bytes()]


def engine_of(server: Server) -> int:
    (engine,) = children(server, "headrace.wiring.engine_process")
    return engine


def pages_of_rows(server: Server) -> int:
    """The pages of memory that the server's file of rows takes."""
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        if "headrace-image-rows" in str(each.readlink()):
            return each.stat().st_blocks * 512 // PAGE
    raise AssertionError("there is no file")


def check_that_only_the_cache_has_rows(server: Server) -> None:
    """Once all requests have ended, nothing else is in the file."""
    server.wait_until(lambda info: info["open_requests"] == 0)
    until = time.monotonic() + 60
    while (pages := pages_of_rows(server)) * IMAGE_BYTES != server.metric("mm_cache_bytes"):
        assert time.monotonic() < until, (pages, server.metric("mm_cache_bytes"))
        time.sleep(0.02)
    assert pages


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
    check_that_only_the_cache_has_rows(divided)
    assert divided.post("/v1/chat/completions", asked(CONVERSATIONS[0])).status_code == 200


def test_a_front_end_that_is_killed_leaves_nothing(divided: Server) -> None:
    fronts = children(divided, "headrace.wiring.front_ends")
    if not fronts:
        pytest.skip("the server's own process answers")

    def ask(number: int) -> None:
        with suppress(httpx.HTTPError):
            messages = user(url_part(number), url_part(number + 20))
            divided.post("/v1/chat/completions", asked(messages, max_tokens=80))

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(60, 72)]
    for each in callers:
        each.start()
    time.sleep(0.05)
    os.kill(fronts[0], signal.SIGKILL)
    for each in callers:
        each.join(60)
    divided.wait_until(lambda info: len(children(divided, "headrace.wiring.front_ends")) == len(fronts))
    check_that_only_the_cache_has_rows(divided)
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
    check_that_only_the_cache_has_rows(divided)
    os.kill(engine_of(divided), signal.SIGKILL)
    for messages in (user(url_part(6)), CONVERSATIONS[3]):
        failed = divided.post("/v1/chat/completions", asked(messages, cache_salt="later"))
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
    assert divided.stop() == 0
