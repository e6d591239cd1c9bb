"""``headrace cache pairs`` against a small server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError
from tests.cli.fake_server import FakeServer, running


class PairServer(FakeServer):
    """Has two pairs, and takes labels unless they have the word "wrong"."""

    def __init__(self) -> None:
        super().__init__()
        self.app.router.routes += [
            Route("/v1/cache/pairs", self.pairs),
            Route("/v1/cache/pairs", self.label, methods=["POST"]),
        ]

    async def pairs(self, request: Request) -> Response:
        tenant = request.query_params.get("tenant")
        return PlainTextResponse("{}\n" if tenant == "acme" else "{}\n{}\n")

    async def label(self, request: Request) -> Response:
        if b"wrong" in await request.body():
            return JSONResponse({"error": {"message": "line 1: label: expected same or different"}}, 400)
        return JSONResponse({"stored": 2, "others": 1, "without_label": 3})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(fake=PairServer()) as server:
        yield server


def call(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["cache", "pairs", *map(str, words)])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, done.output


def test_export_and_import(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    assert call("export", file, "--url", server.url) == (0, f"written      2 pairs to {file}\n")
    assert file.read_text() == "{}\n{}\n"
    assert file.stat().st_mode & 0o077 == 0
    assert "1 pairs" in call("export", file, "--tenant", "acme", "--url", server.url)[1]
    code, said = call("import", file, "--url", server.url)
    assert code == 0
    assert "imported     2 labels, 1 of pairs that are not served, 3 lines without a label" in said
    file.write_text("wrong")
    code, said = call("import", file, "--url", server.url)
    assert (code, said) == (1, "headrace: line 1: label: expected same or different\n")
    with pytest.raises(ConfigError, match="cannot be read: no such file"):
        call("import", tmp_path / "gone", "--url", server.url)
