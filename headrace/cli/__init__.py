"""The command line. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import sys

import typer

from headrace.cli.batch import run_batch
from headrace.cli.bench import bench_app
from headrace.cli.cache import cache_app
from headrace.cli.chat import chat
from headrace.cli.complete import complete
from headrace.cli.doctor import doctor
from headrace.cli.plan import plan
from headrace.cli.quantize import quantize
from headrace.cli.replay import replay
from headrace.cli.serve import serve
from headrace.cli.simulate import simulate
from headrace.cli.warm import warm

app = typer.Typer(
    name="headrace",
    help="Serve large language models: continuous batching over a paged KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help wraps long flags, where tables cut them
)
for command in (serve, chat, complete, run_batch, replay, simulate, plan, quantize, doctor, warm):
    app.command()(command)
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")


def main() -> None:
    """The ``headrace`` command: a wrong setting is one line on stderr, not a traceback."""
    from headrace.config import ConfigError

    try:
        app()
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(2) from None
