"""``headrace complete``: a text completion from a running server."""

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
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to complete; - reads it from standard input.")
    ],
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name (default: the server's first model).")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy (default: the server's).")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling probability, 0 to 1 (default: the server's).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; equal seeds give equal texts (default: random).")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text at which the completion ends. Repeatable (default: none).")
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the completion.")] = False,
    api_key: Annotated[str | None, typer.Option(help="API key of the server (default: none).")] = None,
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
