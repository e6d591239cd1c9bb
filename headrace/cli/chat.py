"""``headrace chat``: a conversation with a running server in the terminal."""

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


HELP = """/clear  start a new conversation
/help   show this list
/exit   leave (also Ctrl-D)
Ctrl-C stops the response."""


Url = Annotated[str, typer.Option(help="Address of the server.")]
Model = Annotated[str | None, typer.Option(help="Model name (default: the server's first model).")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy (default: the server's).")
]
TopP = Annotated[
    float | None, typer.Option(help="Nucleus sampling probability, 0 to 1 (default: the server's).")
]
ApiKey = Annotated[str | None, typer.Option(help="API key of the server (default: none).")]


def chat(
    url: Url = DEFAULT_URL,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System prompt (default: none).")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens per response (default: the server's).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; equal seeds give equal responses (default: random).")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Chat with a running server. If input comes from a pipe, each line is one turn."""
    from rich.console import Console

    console, errors = Console(), Console(stderr=True)
    settings = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        with open_client(url, api_key) as client:
            name = model or served_model(client)
            conversation = Conversation(client, {"model": name, **given}, system)
            if sys.stdin.isatty():
                welcome = f"Chatting with {name} at {url}. /help lists the commands."
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
    """The turns so far, and the request for the next response.

    Args:
        client: of the server.
        settings: fields of every request other than the messages.
        system: the system prompt, which `clear` keeps.
    """

    def __init__(self, client: httpx.Client, settings: dict[str, Any], system: str | None = None) -> None:
        self._client = client
        self._settings = settings
        self._beginning = [{"role": "system", "content": system}] if system else []
        self.tokens = 0  # of the last response
        self.clear()

    def clear(self) -> None:
        """Remove all turns."""
        self.messages: list[dict[str, str]] = list(self._beginning)

    def say(self, text: str) -> Generator[str]:
        """Streams the response to ``text``; an interrupted response stays in the conversation.

        A turn without any response is removed.

        Raises:
            ServerError: the server rejected the request, or the stream ended early.
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
    """The user's lines; Ctrl-C at the prompt starts a new line, Ctrl-D ends the chat."""
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
    """Run turns until the lines end; returns whether any turn failed."""
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
            errors.print(f"there is no command {text.split()[0]}; /help lists the commands", markup=False)
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
        with console.status(""):  # shows nothing if output is no terminal
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


def complete(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to complete; - reads it from standard input.")
    ],
    url: Url = DEFAULT_URL,
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens.")] = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; equal seeds give equal texts (default: random).")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text at which the completion ends. Repeatable (default: none).")
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the completion.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Print the completion of a text as it is generated."""
    text = sys.stdin.read() if prompt == "-" else prompt
    settings = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop or None}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        with open_client(url, api_key) as client:
            name = model or served_model(client)
            body = {"model": name, "prompt": text, "max_tokens": max_tokens, **given}
            if echo:
                sys.stdout.write(text)
            for chunk in stream(client, "/v1/completions", body):
                for choice in chunk.get("choices", ()):
                    sys.stdout.write(printable(choice["text"]))
                    sys.stdout.flush()
    except (ServerError, UnicodeEncodeError) as error:  # the latter: an echo of invalid text
        print(f"headrace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        sys.stdout.write("\n")
