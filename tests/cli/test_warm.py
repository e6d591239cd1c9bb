import json
import sys

import pytest
import typer
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

from headrace.cli.warm import AT_ONCE, warm
from headrace.config import ConfigError
from tests.cli.fake_server import FakeServer, running

app = typer.Typer()
app.command()(warm)


class WarmServer(FakeServer):
    """Takes everything on, and has done it when it is asked the third time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.paused = False
        self.app.router.routes += [
            Route("/v1/cache/warm", self.take, methods=["POST"]),
            Route("/v1/cache/warm", self.state),
        ]

    async def take(self, request):
        body = await self._receive(request)
        taken = {"requests": len(body.get("requests", [])), "prefixes": len(body.get("prefixes", []))}
        return JSONResponse(taken, 202)

    async def state(self, request):
        self.asked += 1
        done = self.asked % 3 == 0
        return JSONResponse(
            {
                "quiet": not self.paused,
                "left_seconds": 1.0,
                "waiting": 0 if done else 2,
                "running": 0,
                "computed": 7 if done else 5,
                "kept": 1,
                "refused": 0,
            }
        )


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(sys.modules["headrace.cli.warm"], "POLL_SECONDS", 0.0)
    with running(fake=WarmServer()) as server:
        yield server


def lines(path, count):
    body = {"model": "echo", "prompt": "hi", "max_tokens": 1}
    with path.open("w") as file:
        for number in range(count):
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def test_requests_and_prompts_are_handed_over_and_waited_for(server, tmp_path):
    lines(tmp_path / "requests.jsonl", AT_ONCE + 1)
    (tmp_path / "system.txt").write_text("Be kind.")
    server.paused = True
    result = CliRunner().invoke(
        app,
        [
            str(tmp_path / "requests.jsonl"),
            *("--system-prompt", str(tmp_path / "system.txt")),
            *("--url", server.url, "--from-history"),
        ],
    )
    assert result.exit_code == 0, result.output
    first, *rest = server.bodies
    assert first == {
        "prefixes": [{"messages": [{"role": "system", "content": "Be kind."}]}],
        "from_history": True,
    }
    assert [len(body["requests"]) for body in rest] == [AT_ONCE, 1]
    assert rest[0]["requests"][0]["url"] == "/v1/completions"
    assert "the server is busy with other requests" in result.stdout
    assert "done         2 computed, 0 cached already, 0 rejected" in result.stdout


def test_without_waiting_it_returns_at_once(server, tmp_path):
    result = CliRunner().invoke(app, ["--from-history", "--no-wait", "--url", server.url])
    assert result.exit_code == 0
    assert server.asked == 1


@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot be read"), ("nonsense", "line 1 is not valid JSON")]
)
def test_a_file_that_is_none_is_refused_before_the_server_is_asked(tmp_path, content, why):
    path = tmp_path / "requests.jsonl"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(app, [str(path), "--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)


def test_nothing_to_warm_is_an_error():
    assert "nothing to warm" in str(CliRunner().invoke(app, []).exception)


def test_a_missing_server_is_an_error_with_a_remedy():
    result = CliRunner().invoke(app, ["--from-history", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "headrace serve" in result.stderr
