"""``headrace cache pairs``: pairs of similar requests of a running server, to label, and their labels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.connection import DEFAULT_URL, ServerError, call_raw, open_client
from headrace.cli.help import CONTEXT, Command, Group
from headrace.config import ConfigError

if TYPE_CHECKING:
    import httpx

PATH = "/v1/cache/pairs"

HELP = "Export pairs of similar requests to label, and import their labels."
pairs_app = typer.Typer(
    cls=Group, help=HELP, no_args_is_help=True, context_settings=CONTEXT, rich_markup_mode=None
)


@pairs_app.callback()
def pairs() -> None:
    """Export pairs of similar requests to label, and import their labels."""


File = Annotated[Path, typer.Argument(metavar="FILE", help="File of JSON lines, one pair a line.")]
Tenant = Annotated[str | None, typer.Option(help="Only the pairs of this tenant (default: all).")]
Url = Annotated[str, typer.Option(help="Address of the server.")]
Key = Annotated[str | None, typer.Option(help="Admin API key of the server (default: none).")]


@pairs_app.command("export", cls=Command, context_settings=CONTEXT)
def export(file: File, tenant: Tenant = None, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Write the pairs that a server recorded, both questions and no answers, to a file.

    Set "label" in each line to "same" if one answer serves both questions, else to "different". Lines without a label
    are left out by the import.
    """
    from headrace.cli.output import writing
    from headrace.files import PRIVATE_FILE, replace_text

    query = {} if tenant is None else {"tenant": tenant}
    answer = _asked(url, api_key, lambda client: call_raw(client, "GET", PATH, query=query))
    with writing("FILE", file):
        replace_text(file, answer.text, PRIVATE_FILE)
    print(f"written      {len(answer.text.splitlines())} pairs to {file}")


@pairs_app.command("import", cls=Command, context_settings=CONTEXT)
def import_labels(file: File, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Send labelled pairs to a server with --semantic-labels.

    A tenant whose labels prove a threshold gets its own certificate.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {(error.strerror or str(error)).lower()}") from error
    done = _asked(url, api_key, lambda client: call_raw(client, "POST", PATH, content=content)).json()
    print(
        f"imported     {done['stored']} labels, {done['others']} of pairs that are not served, "
        f"{done['without_label']} lines without a label"
    )


def _asked(url: str, api_key: str | None, ask: Callable[[httpx.Client], httpx.Response]) -> httpx.Response:
    try:
        with open_client(url, api_key) as client:
            return ask(client)
    except ServerError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
