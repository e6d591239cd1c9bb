"""``headrace complete``: have a running server go on with a text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.connection import (
    DEFAULT_URL,
    ServerError,
    open_client,
    printable,
    served_model,
    stream,
)


def complete(
    prompt: Annotated[str, typer.Argument(help="the text to go on with; - reads it from standard input")],
    url: Annotated[str, typer.Option(help="the server")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="default: the first that the server offers")] = None,
    max_tokens: Annotated[int, typer.Option(help="longest completion")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the server's")] = None,
    top_p: Annotated[float | None, typer.Option(help="nucleus sampling; default: the server's")] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same text")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    echo: Annotated[bool, typer.Option("--echo", help="write the prompt first")] = False,
    api_key: Annotated[str | None, typer.Option(help="if the server asks for one")] = None,
) -> None:
    """Write the completion of a text to standard output as it is made."""
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
    except (ServerError, UnicodeEncodeError) as error:  # the latter: an echo of what is no text
        print(f"headrace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        sys.stdout.write("\n")
