"""The Dockerfile follows hadolint's rules and ours; its health check tells ready from not ready."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, PIP, ROOT, program, run

FILE = DEPLOY / "docker" / "Dockerfile"


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction and its arguments, comments left out and continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def complaints(text: str) -> list[str]:
    """What our own rules say against a Dockerfile."""
    found, wrong = instructions(text), []
    stages = [index for index, (name, _) in enumerate(found) if name == "FROM"]
    last = dict(found[stages[-1] :])
    if len(stages) < 2:
        wrong.append("one stage: compilers would be in the image")
    for index in stages:
        image = found[index][1].split()[0]
        if ":" not in image or image.endswith(":latest"):
            wrong.append(f"{image} has no version")
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", last.get("USER", "")):
        wrong.append("the user must be a number other than 0")
    wrong += [f"{name} is missing" for name in ("HEALTHCHECK", "ENTRYPOINT", "VOLUME") if name not in last]
    if not last.get("ENTRYPOINT", "[").startswith("["):
        wrong.append("a shell as entry point would not pass SIGTERM on")
    return wrong


def test_hadolint_finds_nothing() -> None:
    status, said = run([program("hadolint", PIP), str(FILE)])
    assert status == 0, said


def test_our_rules_hold() -> None:
    assert complaints(FILE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("USER 10001:10001", "USER root"),
        ("USER 10001:10001", "USER 0:0"),
        ("HEALTHCHECK", "LABEL healthcheck="),
        ("FROM python:${PYTHON_VERSION}-slim-bookworm AS build", "FROM python:latest AS build"),
        ('ENTRYPOINT ["headrace"]', "ENTRYPOINT headrace"),
    ],
)
def test_a_broken_rule_is_found(old: str, new: str) -> None:
    text = FILE.read_text()
    assert old in text
    assert complaints(text.replace(old, new))


def test_what_is_copied_exists_and_is_in_the_build_context() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    for name, arguments in instructions(FILE.read_text()):
        if name == "COPY" and not arguments.startswith("--from"):
            for source in arguments.split()[:-1]:
                assert (ROOT / source).exists()
                assert source.removeprefix("./") in allowed


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers every request with one status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *reported: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/health/ready"
        finally:
            server.shutdown()
            thread.join()


def health(url: str) -> int:
    script: Path = DEPLOY / "docker" / "healthcheck.py"
    command = [sys.executable, str(script)]
    return subprocess.run(command, env=os.environ | {"HEALTH_URL": url}, capture_output=True).returncode


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1), (204, 1)])
def test_the_health_check_is_the_servers_readiness(status: int, expected: int) -> None:
    with answering(status) as url:
        assert health(url) == expected


def test_the_health_check_fails_where_nothing_listens() -> None:
    with answering(200) as url:
        pass
    assert health(url) == 1
    assert health("not an address") == 1
