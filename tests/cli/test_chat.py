from collections.abc import Iterator
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.chat import Conversation, chat
from headrace.cli.connection import ServerError, open_client
from tests.cli.fake_server import FakeServer, running

app = typer.Typer()
app.command()(chat)


@pytest.fixture(scope="module")
def _server() -> Iterator[FakeServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(_server: FakeServer) -> FakeServer:
    _server.bodies.clear()
    return _server


def talk(server: FakeServer, lines: str, *flags: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["--url", server.url, *flags], input=lines)
    return result.exit_code, result.stdout, result.stderr


def test_each_line_from_a_pipe_is_a_turn(server: FakeServer) -> None:
    assert talk(server, "hello there\n\nhow are you\n") == (
        0,
        "you said: hello there\nyou said: how are you\n",
        "",
    )
    assert [len(body["messages"]) for body in server.bodies] == [1, 3]
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "you said: hello there"}
    assert server.bodies[0]["model"] == "echo"
    assert server.bodies[0]["stream"] is True


def test_flags_become_fields_and_absent_flags_do_not(server: FakeServer) -> None:
    talk(server, "x\n", "--system", "Be brief.", "--temperature", "0", "--model", "mine")
    (body,) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["model"]) == (0, "mine")
    assert not body.keys() & {"top_p", "max_tokens", "seed"}


def test_commands_are_not_sent(server: FakeServer) -> None:
    code, out, err = talk(server, "one\n/help\n/clear\n/nonsense\ntwo\n/exit\nthree\n", "--system", "s")
    assert code == 0
    assert "/clear" in out
    assert "there is no command /nonsense" in err
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["one", "two"]
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user"]


def test_a_refused_turn_is_reported_and_removed(server: FakeServer) -> None:
    code, out, err = talk(server, "refuse\nfine\n")
    assert (code, out) == (1, "you said: fine\n")
    assert err.strip() == "no such thing [here]"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["fine"]


def test_an_error_in_the_stream_is_reported(server: FakeServer) -> None:
    code, out, err = talk(server, "break\n")
    assert code == 1
    assert "you said: break" in out
    assert "the engine broke" in err


def test_answers_cannot_steer_the_terminal(server: FakeServer) -> None:
    _, out, _ = talk(server, "a\x1b[2Jb [bold]ü😀\u200d👩\n")
    assert out == "you said: a[2Jb [bold]ü😀\u200d👩\n"


def test_a_missing_server_is_an_error_with_a_remedy() -> None:
    result = CliRunner().invoke(app, ["--url", "http://127.0.0.1:9"], input="x\n")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:9" in result.stderr
    assert "headrace serve" in result.stderr


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def interrupt_once(text: str) -> str:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr(import_module("headrace.cli.chat"), "printable", interrupt_once)
    code, _, _ = talk(server, "one two three\nnext\n")
    assert code == 0
    assert [message["content"] for message in server.bodies[1]["messages"]] == [
        "one two three",
        "you said:",
        "next",
    ]


def test_a_conversation_counts_the_tokens_of_its_last_answer(server: FakeServer) -> None:
    with open_client(server.url) as client:
        conversation = Conversation(client, {"model": "echo"})
        assert "".join(conversation.say("hi")) == "you said: hi"
        assert conversation.tokens == 3
        with pytest.raises(ServerError):
            list(conversation.say("refuse"))
        assert len(conversation.messages) == 2
