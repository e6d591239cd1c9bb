"""What happens to caches must not happen to their callers: crowds, dead stores, full disks, two servers on one file."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from tests.doubles.shared_stores import redis_server
from tests.server.conftest import Server, serving

CROWD = 1000
TOKENS = 24


def body(topic: object) -> dict:
    return {"prompt": f"A story about {topic}", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


def ask(server: Server, topic: object) -> tuple[str, str]:
    """The text, and what the header says of it; any error fails."""
    answer = server.post("/v1/completions", body(topic))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.headers["X-Headrace-Cache"]


def cached_again(server: Server, topic: object, seconds: float = 30.0) -> None:
    """Asks until the answer comes from a store, and has cost no token: it may be in the middle of being kept."""
    until = time.monotonic() + seconds
    while True:
        computed = server.metric("generation_tokens_total")
        _, note = ask(server, topic)
        if note.startswith("hit"):
            assert server.metric("generation_tokens_total") == computed
            return
        assert time.monotonic() < until, note


async def exchange(url: str, asked: dict) -> tuple[str, str]:
    """As `ask`, over a connection of its own."""
    content = json.dumps(asked).encode()
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    answer = await reader.readexactly(int(headers.split("content-length:")[1].split("\r\n")[0]))
    writer.close()
    assert headers.startswith("http/1.1 200"), answer
    note = headers.split("x-headrace-cache:")[1].split("\r\n")[0].strip()
    return json.loads(answer)["choices"][0]["text"], note


def test_a_crowd_that_asks_the_same_at_once_is_computed_once():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * CROWD), hard), hard))
    try:
        with serving("--response-cache", "memory") as server:

            async def crowd():
                return await asyncio.gather(*(exchange(server.url, body("a crowd")) for _ in range(CROWD)))

            answers = asyncio.run(crowd())
            assert len({text for text, _ in answers}) == 1
            assert [note for _, note in answers].count("miss") == 1
            assert server.metric("generation_tokens_total") == TOKENS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_redis_that_hangs_and_one_that_is_killed_cost_their_callers_nothing_but_time():
    with redis_server() as redis:
        flags = ["--response-cache", f"redis://127.0.0.1:{redis.port}/0", "--response-cache-secret", "secret"]
        with serving(*flags) as server:
            first, _ = ask(server, "a store")
            redis.process.send_signal(signal.SIGSTOP)
            hung = [ask(server, "a store") for _ in range(8)]
            redis.process.send_signal(signal.SIGCONT)
            redis.kill()
            gone = [ask(server, "a store") for _ in range(8)]
            assert [text for text, _ in hung + gone] == [first] * 16
            assert not any(note.startswith("hit") for _, note in gone)
            assert server.metric("response_cache_faults_total") > 0


def test_on_a_full_disk_callers_are_answered_all_the_same(tmp_path):
    with serving("--response-cache", f"sqlite:{tmp_path / 'answers.db'}") as server:
        first = [ask(server, topic)[0] for topic in range(8)]
        written = sum(path.stat().st_size for path in tmp_path.iterdir())
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (written, written))
        more = [ask(server, topic)[0] for topic in range(8, 48)]
        assert server.metric("response_cache_faults_total") > 0
        assert [ask(server, topic)[0] for topic in range(48)] == first + more
        assert server.get("/health").status_code == 200


def test_two_servers_on_one_file_and_one_of_them_is_killed(tmp_path):
    # A busy machine is late now and then, and what is late is a miss: not what is tested here.
    flags = ["--response-cache", f"sqlite:{tmp_path / 'answers.db'}", "--response-cache-timeout", "30"]
    with serving(*flags) as one, serving(*flags) as other, ThreadPoolExecutor(8) as callers:
        topics = [topic for topic in range(12) for _ in range(2)]
        reported = list(callers.map(ask, [one, other] * 12, topics))
        texts = [text for text, _ in reported]
        assert texts[::2] == texts[1::2]
        one.process.kill()
        one.process.wait()
        again = list(callers.map(ask, [other] * 12, range(12)))
        assert [text for text, _ in again] == texts[::2]
        for topic in range(12):
            cached_again(other, topic)
        computed = other.metric("generation_tokens_total")
        assert all(ask(other, topic)[1].startswith("hit") for topic in range(12))
        assert other.metric("generation_tokens_total") == computed
