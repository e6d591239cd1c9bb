"""Each example runs as a user runs it, against a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from headrace import LLM, SamplingParams
from headrace.compute.adapters.layout import adapter_layout
from headrace.compute.model.hub import resolve_model
from headrace.compute.model.weights import read_spec
from tests.doubles.adapters import write_adapter
from tests.doubles.forks import run_forked
from tests.doubles.shared_stores import free_port
from tests.server.conftest import Server, serving

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving() as server:
        yield server


def run(*command: str) -> str:
    """What a Python process says that ends well."""
    done = run_forked(*command, folder=ROOT, PYTHONPATH=str(ROOT), COLUMNS="120")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openai_chat(running):
    text = run("examples/openai_chat.py", running.url + "/v1")
    reported = re.search(r"\[builtin: (\d+) prompt \+ (\d+) output tokens\]$", text.strip())
    assert reported
    assert int(reported[1]) > 0
    assert len(text[: reported.start()].split()) > 5


def test_lora(tmp_path):
    layout = adapter_layout(read_spec(resolve_model("builtin")))
    sizes = {name: (each.outputs, each.inputs) for name, each in layout.modules.items()}
    adapter = write_adapter(tmp_path / "adapter", sizes, seed=1, size=3.0)
    with serving("--enable-lora") as server:
        loaded, base, own, unloaded = run("examples/lora.py", str(adapter), server.url).splitlines()
    assert loaded == "Success: LoRA adapter 'adapter' added successfully."
    assert unloaded == "Success: LoRA adapter 'adapter' removed successfully."
    assert (base.split(": ")[0], own.split(": ")[0]) == ("builtin", "adapter")
    assert base.split(": ")[1] != own.split(": ")[1]


def test_structured_output(running):
    text = run("examples/structured_output.py", running.url + "/v1")
    assert re.search(r"parsed: name='.*' age=\d+", text)
    assert re.search(r"choice: (yes|no)\n", text)


def test_tool_calls(running):
    text = run("examples/tool_calls.py", running.url + "/v1")
    assert re.match(r"call: get_weather \{'city': '(Paris|Oslo|Rome)', 'days': [1-7]\}\nanswer: .", text)


def test_embeddings():
    with serving("--embedding-model", "builtin") as server:
        text = run("examples/embeddings.py", server.url + "/v1")
    assert re.search(r"dimensions: \d+, tokens: \d+\nnearest: .+\n", text)
    assert len(re.findall(r"^-?\d\.\d{3}  .+$", text, re.MULTILINE)) == 2


def test_langchain_chat(running):
    pytest.importorskip("langchain_openai")
    text = run("examples/langchain_chat.py", running.url + "/v1")
    _, usage, streamed = text.partition("'output_tokens': ")
    assert usage
    assert len(streamed.partition("\n")[2].split()) > 5


def test_shared_prefix(running):
    lines = run("examples/shared_prefix.py", running.url + "/v1").splitlines()
    facts = [
        [int(n) for n in re.search(r"prompt (\d+) .*cached_tokens=(\d+)", line).groups()] for line in lines
    ]
    (_, cold), *later = facts
    assert len(later) == 2
    assert cold < 16
    assert all(cached > 0.95 * prompt for prompt, cached in later)


def test_offline():
    text = run("examples/offline.py")
    completed, _, answers = text.partition("\n1: ")
    prompts = [r"^Once upon a time\b", r"^There was once a fox\b", r"^One day, a queen\b"]
    assert all(
        re.search(prompt + r"[^\]]+  \[\w+, \d+ tokens\]$", completed, re.MULTILINE) for prompt in prompts
    )
    first, _, second = answers.partition("\n2: ")
    assert first.strip()
    assert second.strip()
    assert first.strip() != second.strip()


def test_async_streaming():
    *stories, last = run("examples/async_streaming.py").strip().splitlines()
    deltas = [int(re.search(r"\[(\d+) deltas\]$", story)[1]) for story in stories if story.endswith("]")]
    assert len(deltas) == 3
    assert all(count > 1 for count in deltas)
    tokens = int(re.fullmatch(r"cancelled after (\d+) tokens", last)[1])
    assert 5 <= tokens < 500


def test_custom_policy(tmp_path):
    trace = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{i // 2:02}.{5 * (i % 2)},{200 + 900 * (i % 4)},{9 + i}" for i in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    rows = run("examples/custom_policy.py", str(trace)).splitlines()
    assert rows[0].endswith("azure.csv")
    assert [row[:20].strip() for row in rows[1:]] == ["policy", "arrival", "fair", "short prompts first"]


def test_fastapi_mount():
    pytest.importorskip("fastapi")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "examples/fastapi_mount.py", str(port)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/llm/health", timeout=60).raise_for_status()
                break
            except httpx.ConnectError:
                assert process.poll() is None, process.stdout.read()
                assert time.monotonic() < until
                time.sleep(0.1)
        assert httpx.get(f"{url}/story", params={"about": "a bear"}, timeout=60).json()["story"]
        assert "prompt +" in run("examples/openai_chat.py", f"{url}/llm/v1")
    finally:
        process.send_signal(signal.SIGINT)
        reported, _ = process.communicate(timeout=60)
    assert "Application shutdown complete" in reported


def test_batch(running, tmp_path):
    results = tmp_path / "results.jsonl"
    command = ["-m", "headrace", "run-batch", "-i", "examples/batch.jsonl", "-o", str(results)]
    assert "4 of 4 lines done: 4 succeeded" in run(*command, "--url", running.url)
    first = results.read_text()
    reported = [json.loads(line) for line in first.splitlines()]
    asked = [json.loads(line)["custom_id"] for line in (EXAMPLES / "batch.jsonl").read_text().splitlines()]
    assert sorted(each["custom_id"] for each in reported) == sorted(asked)
    assert all(each["response"]["status_code"] == 200 for each in reported)
    assert "4 done before" in run(*command, "--url", running.url)
    assert results.read_text() == first


@pytest.mark.parametrize("path", ["examples/ray_serve.py", "examples/ray_data.py", "examples/ray_ranks.py"])
def test_ray_examples_are_valid_without_ray(path):
    compile((ROOT / path).read_text(), path, "exec")


def test_ray_serve_keeps_prefixes_on_their_replicas():
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    lines = re.findall(r"(\w+) (\d): replica (\w+), (\d+) of \d+ prompt", run("examples/ray_serve.py"))
    assert len(lines) == 8
    assert all(int(cached) > 0 for _, number, _, cached in lines if number != "0")


def test_ray_data_answers_each_row_once(tmp_path):
    pytest.importorskip("ray.data", reason="ray[data] is not installed")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": f"Once {i}"}) + "\n" for i in range(40)))
    run("examples/ray_data.py", str(prompts), str(tmp_path / "answers"), "--max-tokens", "4")
    rows = [
        json.loads(line)
        for path in (tmp_path / "answers").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert sorted(row["id"] for row in rows) == list(range(40))
    assert all(row["output_tokens"] for row in rows)


@pytest.fixture
def two_ray_nodes(monkeypatch):
    """Two nodes of Ray with a CPU each, so that no node has room for two ranks."""
    pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield
    cluster.shutdown()


def test_ray_ranks_give_the_tokens_of_one_process():
    pytest.importorskip("ray", reason="ray is not installed")
    check_ray_ranks()


def test_ray_ranks_may_be_spread_over_nodes(two_ray_nodes):
    check_ray_ranks("--strategy", "STRICT_SPREAD")


def check_ray_ranks(*arguments: str) -> None:
    """Two ranks answer as one process does."""
    port = free_port()
    command = ["examples/ray_ranks.py", "builtin", "--dtype", "float32", "--tensor-parallel-size", "2"]
    process = subprocess.Popen([sys.executable, *command, "--port", str(port), *arguments], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        answer = None
        for _ in range(180):
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    body = {"model": "builtin", "prompt": "Once upon", "max_tokens": 12, "temperature": 0}
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
                    break
            assert process.poll() is None
            time.sleep(1)
        assert answer is not None
    finally:
        process.terminate()
        assert process.wait(60) == 0
    llm = LLM("builtin", dtype="float32")
    (expected,) = llm.generate(["Once upon"], SamplingParams(max_tokens=12, temperature=0.0))
    assert answer["choices"][0]["text"] == expected.outputs[0].text


def test_every_example_is_listed_and_run_in_a_test():
    page = (EXAMPLES / "README.md").read_text()
    here = "".join(
        path.read_text() for path in (Path(__file__), ROOT / "tests/server/test_prefill_decode.py")
    )
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".jsonl"):
            assert f"({file.name})" in page
            assert f"examples/{file.name}" in here
