"""The command line. Commands import what they need when they run, so that ``--help`` answers at once.

- `help`: grouped help at the terminal's width.
- `options`: flags from the configuration's parts.
- `output`: tables, files, errors of writing them, and progress of long commands. `connection`: requests to a running
  server.
- `workloads`, `machines`: flags of workloads and of simulated machines, which several commands share.
- `serve`, `chat`, `batch`, `warm`, `cache`, `experiment`, `tune`, `quantize`, `doctor`: one file
  per command, or per few of a kind.
- `simulate`, `plan`, `replay`: commands that run the engine in virtual time. `bench`: measures engines and servers.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli.batch import run_batch
from headrace.cli.bench.commands import bench_app
from headrace.cli.cache import cache_app
from headrace.cli.chat import chat, complete
from headrace.cli.doctor import doctor
from headrace.cli.experiment import experiment_app
from headrace.cli.help import CONTEXT, Command, Group
from headrace.cli.plan import plan
from headrace.cli.quantize import quantize
from headrace.cli.replay import replay
from headrace.cli.serve import serve
from headrace.cli.simulate import simulate
from headrace.cli.tune import tune
from headrace.cli.warm import warm

app = typer.Typer(
    name="headrace",
    cls=Group,
    help="Serve large language models: continuous batching over a paged KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # `help` lays out the text; tables would cut long flags
    context_settings=CONTEXT,
)
for command in (serve, chat, complete, run_batch, replay, simulate, plan, tune, quantize, doctor, warm):
    app.command(cls=Command, context_settings=CONTEXT)(command)
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")
app.add_typer(experiment_app, name="experiment")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def headrace(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version and exit.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Serve large language models: continuous batching over a paged KV cache."""


def main() -> None:
    """The ``headrace`` command. A wrong setting is one line on stderr, not a traceback."""
    from headrace.config import ConfigError

    try:
        app()
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(2) from None
