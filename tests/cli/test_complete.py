from collections.abc import Iterator
from io import StringIO

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.chat import complete
from tests.cli.fake_server import FakeServer, running

app = typer.Typer()
app.command()(complete)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running() as server:
        yield server


def test_the_completion_goes_to_standard_output(server: FakeServer) -> None:
    result = CliRunner().invoke(
        app, ["Once upon", "--url", server.url, "--stop", "END", "--max-tokens", "7", "--seed", "3"]
    )
    assert (result.exit_code, result.stdout) == (0, "you said: Once upon\n")
    assert server.bodies[-1] == {
        "model": "echo",
        "prompt": "Once upon",
        "max_tokens": 7,
        "seed": 3,
        "stop": ["END"],
        "stream": True,
    }


def test_the_prompt_may_come_from_a_pipe_and_be_echoed(server: FakeServer) -> None:
    result = CliRunner().invoke(app, ["-", "--echo", "--url", server.url], input="a b")
    assert result.stdout == "a byou said: a b\n"


def test_a_prompt_that_is_no_text_is_one_line(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hands bytes that are no UTF-8 on as halves of letters, which no request can carry."""
    for words, stdin in ((["-"], "a\udcff"), (["a\udcff"], "")):
        monkeypatch.setattr("sys.stdin", StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            app([*words, "--url", server.url])
        assert ended.value.code == 1


def test_a_missing_server_is_an_error_with_a_remedy() -> None:
    result = CliRunner().invoke(app, ["x", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "headrace serve" in result.stderr
