"""The engine in a process of its own: a real server and its second process."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from headrace.compute.adapters.layout import adapter_layout
from headrace.compute.model.hub import resolve_model
from headrace.compute.model.weights import read_spec
from tests.doubles.adapters import write_adapter
from tests.doubles.tiny_encoder import write_cross_encoder, write_embedding_model
from tests.server.conftest import Server, serving

BODY = {"messages": [{"role": "user", "content": "Tell me about Anna."}], "max_tokens": 12, "seed": 7}
SCORED = BODY | {"logprobs": True, "top_logprobs": 2}
SHAPED = BODY | {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
}


def engine_of(server: Server) -> int:
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def streamed(server: Server, body) -> tuple:
    text = server.post("/v1/chat/completions", body | {"stream": True}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    texts, scores, ends = {}, {}, {}  # several tokens may share a chunk, as the server's load has it
    for choice in (choice for each in events for choice in json.loads(each)["choices"]):
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["delta"].get("content", "")
        scores.setdefault(index, []).extend((choice["logprobs"] or {}).get("content", []))
        ends[index] = choice["finish_reason"]
    return texts, scores, ends


@pytest.fixture(scope="module")
def divided():
    with serving("--engine-process", "--response-cache", "memory") as running:
        yield running


@pytest.mark.parametrize("body", [BODY, SCORED, SHAPED, BODY | {"n": 2, "stop": ["e"]}])
def test_answers_are_those_of_one_process(server, divided, body):
    one, two = (each.post("/v1/chat/completions", body).json() for each in (server, divided))
    assert two["choices"] == one["choices"]
    assert two["usage"]["completion_tokens"] == one["usage"]["completion_tokens"]
    assert streamed(divided, body | {"seed": 8}) == streamed(server, body | {"seed": 8})


def test_requests_are_explained_and_counted(divided):
    before = divided.metric("generation_tokens_total")
    body = BODY | {"request_id": "explained", "cache_salt": "own"}
    assert divided.post("/v1/chat/completions", body).status_code == 200
    shown = divided.get("/v1/requests/chatcmpl-explained").json()
    assert shown["state"] == "finished"
    assert divided.metric("generation_tokens_total") > before
    assert divided.metric("scheduler_step_seconds_sum") > 0
    assert divided.get("/v1/steps").json()["memory"]["total"] > 0


def test_settings_of_the_engine_change_from_the_server(divided):
    assert divided.post("/reset_prefix_cache").json() == {"reset": True}
    for mode in ("on", "off"):
        assert divided.post("/v1/tuner", {"mode": mode}).json()["mode"] == mode


@pytest.mark.parametrize("level", [1, 2])
def test_the_model_sleeps_and_its_cache_answers(divided, level):
    cached, other = BODY | {"temperature": 0, "seed": None}, BODY | {"seed": 20 + level}
    expected = [divided.post("/v1/chat/completions", body).json()["choices"] for body in (cached, other)]
    while not divided.post("/v1/chat/completions", cached).headers["X-Headrace-Cache"].startswith("hit"):
        pass  # it is being written
    slept = divided.post(f"/sleep?level={level}").json()
    assert slept["sleeping"] == ["kv_cache", "weights"][:level]
    assert divided.post("/v1/chat/completions", cached).json()["choices"] == expected[0]
    refused = divided.post("/v1/chat/completions", other | {"cache_salt": "new"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert divided.post("/wake_up").json()["is_sleeping"] is False
    again = divided.post("/v1/chat/completions", other | {"cache_salt": "new"})
    assert again.json()["choices"] == expected[1]


def test_a_client_that_leaves_frees_its_request(divided):
    body = BODY | {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", divided.url + "/v1/chat/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    divided.wait_until(lambda info: info["open_requests"] == 0)


def test_a_signal_to_both_processes_leaves_the_engine_to_the_server(divided):
    os.kill(engine_of(divided), signal.SIGTERM)
    os.kill(engine_of(divided), signal.SIGINT)
    assert divided.post("/v1/chat/completions", BODY | {"cache_salt": "signals"}).status_code == 200


def test_an_engine_that_is_killed_is_started_again_three_times(server, divided):
    """The last test of this file: its server computes nothing afterwards."""
    body = BODY | {"max_tokens": 800, "ignore_eos": True, "cache_salt": "killed"}
    ended, steps = [], divided.get("/server_info").json()["steps"]
    waiting = threading.Thread(target=lambda: ended.append(divided.post("/v1/chat/completions", body)))
    waiting.start()
    divided.wait_until(lambda info: info["steps"] > steps + 3)
    os.kill(engine_of(divided), signal.SIGKILL)
    waiting.join(60)
    assert ended[0].json()["choices"] == server.post("/v1/chat/completions", body).json()["choices"]
    for again in range(2):
        os.kill(engine_of(divided), signal.SIGKILL)
        assert (
            divided.post("/v1/chat/completions", BODY | {"cache_salt": f"again {again}"}).status_code == 200
        )
    assert divided.metric("engine_losses_total") == 3.0

    os.kill(engine_of(divided), signal.SIGKILL)
    later = divided.post("/v1/chat/completions", BODY | {"cache_salt": "later"})
    assert later.status_code == 503
    assert later.json()["error"]["code"] == "engine_failed"
    health = divided.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "the engine failed")
    assert any("its process ended by SIGKILL" in line for line in divided.lines)
    assert divided.stop() == 0


def test_an_orderly_end_ends_both_processes():
    with serving("--engine-process", "--no-access-log") as running:
        engine = engine_of(running)
        assert running.stop() == 0
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_embeddings_and_scores_are_those_of_one_process_and_survive_the_loss_of_the_engine(
    tmp_path: Path,
) -> None:
    tiny, cross = write_embedding_model(tmp_path / "tiny"), write_cross_encoder(tmp_path / "cross")
    flags = "--embedding-model", str(tiny), "--rerank-model", str(cross)
    asked = {"model": "tiny", "input": ["a b c", "d", "e f g h"]}
    ranked = {"model": "cross", "query": "a b", "documents": ["b", "c d", "a"]}

    def answers(running: Server) -> tuple:
        found = running.post("/v1/embeddings", asked).json(), running.post("/v1/rerank", ranked).json()
        return found[0]["data"], found[0]["usage"], found[1]["results"]

    with serving(*flags) as one:
        expected = answers(one)
    with serving(*flags, "--engine-process", "--api-server-count", "2") as two:
        assert answers(two) == expected
        assert two.post("/v1/embeddings", asked | {"input": "a " * 40}).status_code == 400
        os.kill(engine_of(two), signal.SIGKILL)
        assert answers(two) == expected
        assert two.metric("engine_losses_total") == 1.0
        assert two.metric("embedding_tokens_total") > 0
    with (
        serving("--engine-process", "--embedding-model", "builtin") as shared,
        serving("--embedding-model", "builtin") as one,
    ):
        body = {"model": "builtin", "input": "Tell me about Anna."}
        assert (
            shared.post("/v1/embeddings", body).json()["data"]
            == one.post("/v1/embeddings", body).json()["data"]
        )


@pytest.mark.slow
def test_adapters_are_loaded_and_survive_the_loss_of_the_engine(tmp_path: Path) -> None:
    layout = adapter_layout(read_spec(resolve_model("builtin-draft")))
    sizes = {name: (each.outputs, each.inputs) for name, each in layout.modules.items()}
    folders = [str(write_adapter(tmp_path / f"a{seed}", sizes, seed=seed, size=2.0)) for seed in range(2)]
    flags = "--enable-lora", "--max-loras", "2", "--lora-modules", f"first={folders[0]}"

    def texts(running: Server) -> list[str]:
        asked = [BODY | {"temperature": 0, "model": name} for name in ("builtin-draft", "first", "second")]
        answers = [running.post("/v1/chat/completions", each).json() for each in asked]
        return [each["choices"][0]["message"]["content"] for each in answers]

    second = {"lora_name": "second", "lora_path": folders[1]}
    with serving("builtin-draft", *flags) as one:
        assert one.post("/v1/load_lora_adapter", second).status_code == 200
        expected = texts(one)
    assert len(set(expected)) == 3
    with serving("builtin-draft", *flags, "--engine-process") as two:
        refused = two.post("/v1/load_lora_adapter", second | {"lora_path": str(tmp_path)})
        assert refused.status_code in (400, 404)
        assert two.post("/v1/load_lora_adapter", second).status_code == 200
        assert texts(two) == expected
        os.kill(engine_of(two), signal.SIGKILL)
        assert texts(two) == expected
        assert two.metric("engine_losses_total") == 1.0
        assert two.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 200
        gone = two.post("/v1/chat/completions", BODY | {"model": "second"})
        assert gone.status_code == 404
