"""``headrace chat``: talk to a running server from the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.connection import (
    DEFAULT_URL,
    ServerError,
    open_client,
    printable,
    served_model,
    stream,
)

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

HELP = """/clear  forget the conversation
/help   show this
/exit   leave (so does Ctrl-D)
Ctrl-C stops an answer."""


def chat(
    url: Annotated[str, typer.Option(help="the server")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="default: the first that the server offers")] = None,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the server's")] = None,
    top_p: Annotated[float | None, typer.Option(help="nucleus sampling; default: the server's")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="longest answer")] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same answers")] = None,
    api_key: Annotated[str | None, typer.Option(help="if the server asks for one")] = None,
) -> None:
    """Chat with a running server. With input from a pipe, each line is one turn."""
    from rich.console import Console

    console, errors = Console(), Console(stderr=True)
    settings = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        with open_client(url, api_key) as client:
            name = model or served_model(client)
            conversation = Conversation(client, {"model": name, **given}, system)
            if sys.stdin.isatty():
                welcome = f"Chatting with {name} at {url}. /help shows what else there is."
                console.print(welcome, style="dim", markup=False, highlight=False)
                failed = _run(conversation, _ask(console), console, errors)
            else:
                failed = _run(conversation, (line.rstrip("\n") for line in sys.stdin), console, errors)
    except ServerError as error:
        errors.print(str(error), markup=False, style="red")
        raise typer.Exit(1) from None
    if failed:
        raise typer.Exit(1)


class Conversation:
    """The turns so far, and how to ask for the next answer.

    Args:
        client: of the server.
        settings: fields of every request beside the messages.
        system: the system prompt, which `clear` keeps.
    """

    def __init__(self, client: httpx.Client, settings: dict[str, Any], system: str | None = None) -> None:
        self._client = client
        self._settings = settings
        self._beginning = [{"role": "system", "content": system}] if system else []
        self.tokens = 0  # of the last answer
        self.clear()

    def clear(self) -> None:
        """Forget all turns."""
        self.messages: list[dict[str, str]] = list(self._beginning)

    def say(self, text: str) -> Generator[str]:
        """The answer to ``text``, piece by piece; a stopped answer stays as far as it went.

        A turn without any answer is taken back, so that the user may try another.

        Raises:
            ServerError: the server refused, or broke off.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        body = {**self._settings, "messages": self.messages, "stream_options": {"include_usage": True}}
        self.tokens = 0
        try:
            for chunk in stream(self._client, "/v1/chat/completions", body):
                if usage := chunk.get("usage"):
                    self.tokens = usage.get("completion_tokens", 0)
                for choice in chunk.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        pieces.append(piece)
                        yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()


def _ask(console: Console) -> Iterator[str]:
    """The user's lines; Ctrl-C at the prompt begins a new one, Ctrl-D ends."""
    with suppress(ImportError):
        import readline  # noqa: F401 (gives the prompt line editing and history)
    while True:
        try:
            yield console.input("[bold cyan]>[/] ")
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            return


def _run(conversation: Conversation, lines: Iterator[str], console: Console, errors: Console) -> bool:
    """Take turns until the lines end; whether any turn failed."""
    failed = False
    for line in lines:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/clear":
            conversation.clear()
        elif text == "/help":
            console.print(HELP, markup=False, highlight=False)
        elif text.startswith("/"):
            errors.print(f"there is no command {text.split()[0]}; /help shows those there are", markup=False)
        elif text:
            try:
                _turn(conversation, text, console)
            except ServerError as error:
                errors.print(str(error), markup=False, style="red")
                failed = True
    return failed


def _turn(conversation: Conversation, text: str, console: Console) -> None:
    began = time.monotonic()
    answer = conversation.say(text)
    try:
        with console.status(""):  # shows nothing where output is no terminal
            first = next(answer, "")
        for piece in chain((first,), answer):
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
        stopped = False
    except KeyboardInterrupt:
        answer.close()
        stopped = True
    sys.stdout.write("\n")
    sys.stdout.flush()
    if console.is_terminal:
        seconds = time.monotonic() - began
        note = (
            "stopped" if stopped else f"{conversation.tokens} tokens, {conversation.tokens / seconds:.0f}/s"
        )
        console.print(note, style="dim", highlight=False)
