"""A second server on the addresses and files of one that runs: it is refused in one line, and the first goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.doubles.forks import run_forked
from tests.server.conftest import SMALL, START_SECONDS, Server, serving


class Occupied(NamedTuple):
    """A server with all its files in a folder."""

    server: Server
    folder: Path


@pytest.fixture(scope="module")
def occupied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Occupied]:
    folder = tmp_path_factory.mktemp("s")
    with serving("--uds", str(folder / "s"), *files(folder)) as server:
        yield Occupied(server, folder)


def files(folder: Path) -> list[str]:
    return [
        *("--response-store", str(folder / "responses.db"), "--batch-path", str(folder / "batches")),
        *("--usage-file", str(folder / "usage.db"), "--history-file", str(folder / "history.db")),
        *("--response-cache", f"sqlite:{folder / 'cache.db'}"),
    ]


def client(occupied: Occupied) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(occupied.folder / "s"))
    return httpx.Client(transport=transport, base_url="http://localhost", timeout=60)


def second(*flags: str) -> str:
    """The last words of a second server, which ends by itself."""
    ended = run_forked("-m", "headrace", "serve", "--port", "0", *SMALL, *flags, timeout=START_SECONDS)
    said = ended.stdout + ended.stderr
    assert ended.returncode not in (0, -9), said
    assert "Traceback" not in said
    return [line for line in said.splitlines() if line.strip()][-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--uds", "{}/s"], "another server listens on this socket"),
        (["--response-store", "{}/responses.db"], "responses.db"),
        (["--batch-path", "{}/batches", "--takeover-timeout", "0"], "another server uses"),
    ],
)
def test_a_second_server_is_refused_and_the_first_goes_on(
    occupied: Occupied, flags: list[str], words: str
) -> None:
    with client(occupied) as first:
        body = {"model": "builtin", "input": "Hello", "max_output_tokens": 4, "store": True}
        stored = first.post("/v1/responses", json=body)
        assert stored.status_code == 200, stored.text
        assert words in second(*[each.format(occupied.folder) for each in flags])
        assert first.get(f"/v1/responses/{stored.json()['id']}").status_code == 200
        assert first.post("/v1/responses", json=body).status_code == 200


def test_servers_share_the_files_that_are_made_for_it(occupied: Occupied) -> None:
    """A response cache, a history and the usage file may have several writers."""
    folder = occupied.folder
    flags = [
        *("--usage-file", str(folder / "usage.db"), "--history-file", str(folder / "history.db")),
        *("--response-cache", f"sqlite:{folder / 'cache.db'}"),
    ]
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    with serving(*flags) as other, client(occupied) as first:
        text = first.post("/v1/completions", json=body).json()["choices"][0]["text"]
        for _ in range(3):
            assert other.post("/v1/completions", body).json()["choices"][0]["text"] == text
        assert first.get("/health").status_code == other.get("/health").status_code == 200
        assert not [line for line in (*other.lines, *occupied.server.lines) if "ERROR" in line]
