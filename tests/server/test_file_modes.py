"""Every file that a server makes with all its stores on: only the server's user can read it."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Server, serving

CHAT = {"model": "builtin", "temperature": 0, "max_tokens": 4}
FILES = {
    *("answers.db", "history.db", "usage.db", "responses.db", "files/batches.db"),
    *("trace.jsonl", "experiments.json", "files/lock", "kv/blocks.kv", "kv/snapshot.kv"),
}
"""Files that must have been there, beside those with names of their own."""


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """The umask of most machines, which servers that a test starts inherit."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def flags(folder: Path) -> list[str]:
    """The options of all files that a server writes."""
    return [
        *("--response-cache", f"sqlite:{folder / 'answers.db'}", "--response-cache-timeout", "30"),
        *("--history-file", str(folder / "history.db"), "--record-history"),
        *("--usage-file", str(folder / "usage.db"), "--batch-path", str(folder / "files")),
        *("--response-store", str(folder / "responses.db"), "--record-trace", str(folder / "trace.jsonl")),
        *("--experiments-file", str(folder / "experiments.json")),
        *("--kv-offload-path", str(folder / "kv"), "--kv-offload-disk-bytes", str(64 << 20)),
    ]


def use(server: Server) -> None:
    """Use every store once."""
    words = "a secret prompt. " * 20
    chat = CHAT | {"messages": [{"role": "user", "content": words}]}
    assert server.post("/v1/chat/completions", chat).status_code == 200
    assert server.post("/v1/responses", {"model": "builtin", "input": words}).status_code == 200
    change = {"setting": "long_prefill_token_threshold", "value": 64}
    assert server.post("/v1/experiments", {"name": "trial"} | change).status_code in (200, 201, 400)
    line = '{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":'
    line += '{"model":"builtin","max_tokens":2,"messages":[{"role":"user","content":"a secret"}]}}'
    sent = server.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"})
    about = {
        "input_file_id": sent.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = server.post("/v1/batches", about).json()
    until = time.monotonic() + 60
    while server.get(f"/v1/batches/{batch['id']}").json()["status"] != "completed":
        assert time.monotonic() < until
        time.sleep(0.05)


def modes(folder: Path) -> dict[str, str]:
    """The permissions of all files below a folder, and of the folders."""
    return {
        str(path.relative_to(folder)): oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")
    }


def open_ones(found: dict[str, str]) -> dict[str, str]:
    return {name: mode for name, mode in found.items() if int(mode, 8) & 0o077}


@pytest.mark.usefixtures("usual_umask")
def test_all_files_are_private_new_and_old(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    with serving(*flags(folder)) as server:
        use(server)
        running = modes(folder)
        assert server.stop() == 0
    ended = modes(folder)
    assert set(running) | set(ended) >= FILES
    assert open_ones(running) == open_ones(ended) == {}
    assert {"answers.db-wal", "history.db-shm", "files/batches.db-wal"} <= set(running)
    for path in folder.rglob("*"):  # as an older version left them
        path.chmod(0o755 if path.is_dir() else 0o644)
    with serving(*flags(folder)) as server:
        use(server)
        assert server.stop() == 0
    assert {name for name in open_ones(modes(folder)) if (folder / name).is_file()} == set()
