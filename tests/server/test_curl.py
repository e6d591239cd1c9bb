"""curl, as people type it."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

STORY = [{"role": "user", "content": "Tell me a story."}]
CHAT = {"model": "builtin", "messages": STORY, "max_tokens": 8, "temperature": 0}


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", "-m", "60", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_chat(server):
    said = curl(
        f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(CHAT)
    )
    assert json.loads(said)["choices"][0]["message"]["content"]


def test_without_a_content_type(server):
    said = curl(f"{server.url}/v1/completions", "-d", '{"prompt": "Once", "max_tokens": 2}')
    assert json.loads(said)["object"] == "text_completion"


def test_a_stream_is_lines_of_data(server):
    said = curl(
        "-N", "-D", "-", f"{server.url}/v1/chat/completions", "-d", json.dumps(CHAT | {"stream": True})
    )
    head, _, body = said.replace("\r", "").partition("\n\n")
    assert " 200 " in head
    assert "content-type: text/event-stream" in head.lower()
    assert "x-request-id: req_" in head.lower()
    lines = [line for line in body.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "chat.completion.chunk" for line in lines[:-1])


def test_a_large_body_is_refused_before_it_is_sent(server, tmp_path):
    file = tmp_path / "large"
    file.write_bytes(b'{"prompt": "' + b"x" * 9 * 2**20 + b'"}')
    said = curl("-w", "%{http_code}", f"{server.url}/v1/completions", "--data-binary", f"@{file}")
    assert said.endswith("413")
    assert "request_too_large" in said


def test_the_pages_for_people_and_probes(server):
    assert curl(f"{server.url}/health").startswith('{"status":"ok"')
    assert "<title>Headrace API</title>" in curl(f"{server.url}/docs")
    assert "headrace:num_requests_running" in curl(f"{server.url}/metrics")
