"""``headrace warm``: makes a running server compute responses and prompts ahead of time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.connection import DEFAULT_URL, asked, call
from headrace.config import ConfigError

if TYPE_CHECKING:
    import httpx

PATH = "/v1/cache/warm"
AT_ONCE = 1000
POLL_SECONDS = 0.5


def warm(
    requests: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Requests to compute, in OpenAI's batch format (JSON lines).",
            show_default=False,
        ),
    ] = None,
    from_history: Annotated[
        bool,
        typer.Option(
            "--from-history", help="Compute the most frequent requests of the server's --history-file."
        ),
    ] = False,
    system_prompt: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text file of a system prompt to prefill. Repeatable."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until everything has been computed or rejected.")] = True,
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(help="API key of the server (default: none).")] = None,
) -> None:
    """Fill the caches of a running server while it is idle.

    Cached responses belong to the tenant of the API key, or to the default tenant without a key.
    """
    if requests is None and not from_history and not system_prompt:
        raise ConfigError("nothing to warm: give a file of requests, --from-history or --system-prompt")
    lines = [] if requests is None else _read(requests)
    prefixes = [_prefix(path) for path in system_prompt or ()]

    def fill(client: httpx.Client) -> None:
        before = call(client, "GET", PATH)
        for body in _bodies(lines, prefixes, from_history):
            taken = call(client, "POST", PATH, body)
            print(f"accepted     {', '.join(f'{count} {what}' for what, count in taken.items())}")
        if wait:
            _wait(client, before)

    try:
        asked(url, api_key, fill)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _read(path: Path) -> list[dict[str, Any]]:
    from headrace.api.batch.lines import BadLine, read_lines

    lines = []
    try:
        with path.open("rb") as raw_lines:
            for line in read_lines(raw_lines):
                if isinstance(line, BadLine):
                    raise ConfigError(f"{path}: {line.message}")
                lines.append({"url": line.url, "body": line.body})
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    return lines


def _prefix(path: Path) -> dict[str, Any]:
    try:
        return {"messages": [{"role": "system", "content": path.read_text(encoding="utf-8")}]}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: the file is not UTF-8 text") from error


def _bodies(
    lines: list[dict[str, Any]], prefixes: list[dict[str, Any]], from_history: bool
) -> Iterator[dict[str, Any]]:
    """Request bodies of a size that a server accepts."""
    if prefixes or from_history:
        yield {"prefixes": prefixes, "from_history": from_history}
    for first in range(0, len(lines), AT_ONCE):
        yield {"requests": lines[first : first + AT_ONCE]}


def _wait(client: httpx.Client, before: dict[str, Any]) -> None:
    """Waits until all work is done; prints the reason whenever the server pauses."""
    announced = False
    while True:
        state = call(client, "GET", PATH)
        if not state["waiting"] and not state["running"]:
            break
        paused = not state["quiet"] or not state["left_seconds"]
        if paused and not announced:
            why = (
                "--warm-seconds-per-hour is used up"
                if state["quiet"]
                else "the server is busy with other requests"
            )
            print(f"paused       {state['waiting']} requests wait: {why}")
        announced = paused
        time.sleep(POLL_SECONDS)
    done = {what: state[what] - before[what] for what in ("computed", "kept", "refused")}
    print(
        f"done         {done['computed']} computed, {done['kept']} cached already, {done['refused']} rejected"
    )
