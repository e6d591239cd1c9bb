"""A real server of several models: the built-in one twice, under two names and with different options."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.doubles.forks import run_forked
from tests.server.conftest import serving

MODELS = [
    {"model": "builtin", "served-model-name": "small", "max-model-len": 256},
    {"model": "builtin", "served_model_name": ["large", "org/large"], "response-cache": "memory"},
]
BODY = {"messages": [{"role": "user", "content": "Tell me about Anna."}], "max_tokens": 12, "seed": 7}
LONG = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def models():
    keys = ["--api-key", "alpha", "--admin-key", "chief", "--drain-timeout", "1"]
    with serving("--models", json.dumps(MODELS), *keys) as running:
        yield running


@pytest.fixture
def client(models):
    with httpx.Client(base_url=models.url, headers={"Authorization": "Bearer chief"}, timeout=60) as client:
        yield client


def chat(client: httpx.Client, model: str | None, **more) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": model} | BODY | more)


def test_requests_go_to_the_model_that_they_name(client, server):
    alone = server.post("/v1/chat/completions", BODY).json()["choices"]
    for name, model in (("small", "small"), ("large", "large"), ("org/large", "large")):
        answer = chat(client, name)
        assert (answer.json()["model"], answer.json()["choices"]) == (model, alone)
    assert chat(client, "small", max_tokens=300).status_code == 400  # --max-model-len of the first
    assert chat(client, "large", max_tokens=300, stop=["."]).status_code == 200


def test_streams(client):
    for name in ("small", "large"):
        with client.stream("POST", "/v1/chat/completions", json={"model": name, "stream": True} | BODY) as r:
            lines = [line for line in r.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert {json.loads(line[6:])["model"] for line in lines[:-1]} == {name}


def test_names_that_are_missing_or_unknown(client):
    missing, unknown = chat(client, None), chat(client, "other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (400, "model_required")
    assert "small, large" in missing.json()["error"]["message"]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert client.post("/sleep").json()["error"]["code"] == "model_required"
    body = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert body.json()["error"]["code"] == "invalid_json"


def test_keys_are_checked_here_and_there(client, models):
    for key, status in (("nobody", 401), ("alpha", 403)):
        headers = {"Authorization": f"Bearer {key}"}
        assert client.post("/sleep?model=small", headers=headers).status_code == status
        assert client.post("/models/small/sleep", headers=headers).status_code == status
    assert httpx.get(f"{models.url}/models/small/health").status_code == 200
    assert httpx.get(f"{models.url}/v1/models").status_code == 401


def test_pages_of_all_models(client):
    listed = [card["id"] for card in client.get("/v1/models").json()["data"]]
    assert [name for name in listed if name in ("small", "large", "org/large")] == [
        *("small", "large", "org/large")
    ]
    assert client.get("/v1/models/org/large").json()["id"] == "org/large"
    for path in ("/health", "/health/ready"):
        page = client.get(path)
        assert (page.status_code, page.json()["status"]) == (200, "ok")
        assert [*page.json()["models"]] == ["small", "large"]
    text = client.get("/metrics").text
    assert text.count("# TYPE headrace:num_requests_running") == 1
    assert 'headrace:num_requests_running{model_name="small"} 0.0' in text
    assert 'headrace:num_requests_running{model_name="large"} 0.0' in text
    assert 'model_name="small"' not in client.get("/metrics?model=large").text
    assert client.get("/server_info").json()["models"]["small"]["max_model_len"] == 256
    assert client.get("/models/org/large/dashboard").headers["content-type"].startswith("text/html")


def test_ids_are_found_in_the_model_that_knows_them(client):
    for name in ("small", "large"):
        answer = chat(client, name, seed=3)
        for known in (answer.json()["id"], answer.headers["x-request-id"]):
            assert client.get(f"/v1/requests/{known}").status_code == 200
        made = client.post("/v1/responses", json={"model": name, "input": "hi", "max_output_tokens": 16})
        assert client.get(f"/v1/responses/{made.json()['id']}").json()["model"] == name
        assert client.delete(f"/v1/responses/{made.json()['id']}").status_code == 200
    assert client.get("/v1/requests/none").json()["error"]["code"] == "request_not_found"
    assert client.post("/abort_request", json={"request_id": "none"}).status_code == 404


def idle(client: httpx.Client, name: str) -> None:
    until = time.monotonic() + 30
    while client.get("/server_info", params={"model": name}).json()["open_requests"]:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_client_that_leaves_ends_its_request(client):
    with client.stream("POST", "/v1/chat/completions", json={"model": "large", "stream": True} | LONG) as r:
        next(r.iter_lines())
    idle(client, "large")
    for url in ("/v1/chat/completions", "/models/large/v1/chat/completions"):
        with pytest.raises(httpx.ReadTimeout):
            client.post(url, json={"model": "large"} | LONG, timeout=0.3)
        idle(client, "large")


def test_one_model_sleeps(client):
    assert client.post("/sleep?model=small").json()["is_sleeping"]
    shown = client.get("/is_sleeping").json()
    assert not shown["is_sleeping"]
    assert {name: each["is_sleeping"] for name, each in shown["models"].items()} == {
        "small": True,
        "large": False,
    }
    assert chat(client, "small").json()["error"]["code"] == "sleeping"
    assert chat(client, "large").status_code == 200
    assert client.get("/health/ready").status_code == 200
    assert not client.post("/models/small/wake_up").json()["is_sleeping"]
    assert chat(client, "small").status_code == 200


def test_a_process_that_is_lost_and_the_end(client, models):
    pid = models.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    processes = [
        int(each) for each in children if b"model_server" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]
    assert len(processes) == 2
    os.kill(processes[0], signal.SIGKILL)
    until = time.monotonic() + 60
    statuses = set()
    while (answer := chat(client, "small")).status_code != 200:
        statuses.add((answer.status_code, answer.json()["error"]["code"]))
        assert chat(client, "large").status_code == 200
        assert time.monotonic() < until
        time.sleep(0.05)
    assert statuses == {(503, "model_restarting")}
    assert models.stop() == 0
    assert not [each for each in processes if Path(f"/proc/{each}").exists()]


@pytest.mark.slow
def test_a_front_that_is_killed_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving("--models", json.dumps(MODELS), "--drain-timeout", "1") as running:
        pid = running.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (folder,) = tmp_path.glob("headrace-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        lines = "".join(running.lines)
        assert "[small] startup" in lines
        assert "[large] startup" in lines
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while folder.exists() or any(Path(f"/proc/{each}").exists() for each in children):
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["builtin", "builtin"], "two models have the name builtin"),
        (["--models", "[]"], "expected a list of objects"),
        (["--models", '[{"port": 1}]'], "models[0]: port is an option of the whole server"),
        (["--models", '[{"max-model-len": 1}]'], "models[0]: model is missing"),
        (
            ["--models", '[{"model": "builtin", "max-len": 1}]'],
            "models[0] (builtin): there is no option 'max_len'",
        ),
        (["builtin", "--models", '[{"model": "builtin"}]'], "MODEL and --models both name models"),
        (["a", "b", "--usage-file", "u"], "--usage-file u: several models cannot share it"),
        (["a", "b", "--metrics-port", "0"], "--metrics-port: it is not supported with several models"),
        (["/nowhere/a", "b"], "the model /nowhere/a did not start"),
    ],
)
def test_what_cannot_be_served_is_refused(flags, message):
    ended = run_forked("-m", "headrace", "serve", "--port", "0", *flags)
    assert ended.returncode == 2
    assert message in ended.stderr
