"""``headrace run-batch``: runs a file of requests, and continues an interrupted run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.connection import (
    CONNECT_SECONDS,
    ServerError,
    authorization,
    no_server,
    open_client,
    server_root,
    uses_proxies,
)
from headrace.config import ConfigError

if TYPE_CHECKING:
    import httpx
    from rich.progress import Progress

    from headrace.api.batch.work import Outcome, Results

EXIT_FAILED_LINES = 1
EXIT_STOPPED = 130


Input = Annotated[
    Path,
    typer.Option("--input", "-i", metavar="FILE", help="Requests in OpenAI's batch format (JSON lines)."),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Results; an existing file is continued.")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model for all lines, instead of the one that each line names (default: each line's own)."
    ),
]
Url = Annotated[
    str | None,
    typer.Option(help="Address of a running server (default: none, the requests run in this process)."),
]
MaxConcurrency = Annotated[int, typer.Option(min=1, help="Maximum number of requests at once.")]
Config = Annotated[
    Path | None, typer.Option(help="YAML file of options, as for headrace serve (default: none).")
]
ApiKey = Annotated[str | None, typer.Option(help="API key of the server at --url (default: none).")]


def run_batch(
    input_file: Input,
    output_file: Output,
    model: Model = None,
    url: Url = None,
    max_concurrency: MaxConcurrency = 64,
    config: Config = None,
    api_key: ApiKey = None,
) -> None:
    """Run a batch of requests from a file. The exit status is 1 if a line failed.

    If it is interrupted, run the same command again: it continues and neither loses nor repeats a line.
    """
    from headrace.api.batch.lines import DuplicateId, check_ids, read_lines
    from headrace.api.batch.work import Results, ResultsError

    try:
        if url:
            open_client(url, api_key).close()  # a wrong address is reported before anything is written
        with input_file.open("rb") as raw_lines:
            keys = check_ids(read_lines(raw_lines))
        results = Results(output_file)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error
    except (ServerError, DuplicateId, ResultsError) as error:
        raise ConfigError(str(error)) from error
    import asyncio

    with results:
        tally = Tally(total=len(keys), before=len(keys & results.keys))
        reached = _server(url, api_key, model) if url else _in_process(model, config)
        stopped = ""
        try:
            asyncio.run(_run(reached, input_file, results, max_concurrency, tally))
        except ConnectionError as error:
            stopped = no_server(url, error) if url else str(error)
        except ResultsError as error:
            stopped = str(error)
        except KeyboardInterrupt:
            stopped = "stopped"
        typer.echo(tally.summary(output_file))
        if stopped:
            typer.echo(f"{stopped}\nRun the same command again to continue.", err=True)
            raise typer.Exit(EXIT_STOPPED)
        if results.failed:
            raise typer.Exit(EXIT_FAILED_LINES)


@dataclass(slots=True)
class Tally:
    """Counts of a run so far; ``before`` lines were done by earlier runs."""

    total: int
    before: int
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, outcome: Outcome) -> None:
        """Count one more line."""
        self.succeeded += outcome.succeeded
        self.failed += not outcome.succeeded
        self.prompt_tokens += outcome.prompt_tokens
        self.completion_tokens += outcome.completion_tokens

    @property
    def done(self) -> int:
        """Lines that have a result, from this run and those before."""
        return self.before + self.succeeded + self.failed

    def rate(self) -> str:
        """Output tokens per second."""
        return f"{self.completion_tokens / max(time.monotonic() - self.began, 1e-9):,.0f} tok/s"

    def summary(self, output_file: Path) -> str:
        """A summary in two lines."""
        seconds = time.monotonic() - self.began
        return (
            f"{self.done} of {self.total} lines done: {self.succeeded} succeeded, {self.failed} failed, "
            f"{self.before} done before; results in {output_file}\n"
            f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} output tokens "
            f"in {seconds:.1f} s ({self.rate()})"
        )


@dataclass(frozen=True, slots=True)
class Reached:
    """The server, and the model named in requests (None: each line's own)."""

    client: httpx.AsyncClient
    model: str | None


@asynccontextmanager
async def _server(url: str, api_key: str | None, model: str | None) -> AsyncIterator[Reached]:
    import httpx

    async with httpx.AsyncClient(
        base_url=server_root(url),
        headers=authorization(api_key),
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None),
        trust_env=uses_proxies(url),
    ) as client:
        yield Reached(client, model)


@asynccontextmanager
async def _in_process(model: str | None, config: Path | None) -> AsyncIterator[Reached]:
    """The engine in this process, behind the same ASGI application as `serve`."""
    import httpx

    from headrace.config import BatchOptions, options
    from headrace.wiring.server import build_app

    given = replace(options({"model": model} if model else {}, config), batch=BatchOptions())
    # The file may be a server's configuration with API keys, which are not needed within this process.
    app, lifespan = build_app(replace(given, server=replace(given.server, api_key=(), api_key_file=None)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        lifespan,
        httpx.AsyncClient(
            base_url="http://in-process",
            transport=transport,
            timeout=None,
        ) as client,
    ):
        yield Reached(client, (*given.model.served_model_name, given.model.model)[0] if model else None)


async def _run(
    reaching: AbstractAsyncContextManager[Reached],
    input_file: Path,
    results: Results,
    concurrency: int,
    tally: Tally,
) -> None:
    from headrace.api.batch.lines import read_lines
    from headrace.api.batch.work import run_batch

    async with reaching as reached:
        tally.began = time.monotonic()  # loading the model does not count towards the rate
        with input_file.open("rb") as raw_lines, _progress() as progress:
            bar = progress.add_task("", total=tally.total, completed=tally.before, note="")

            def count(outcome: Outcome) -> None:
                tally.add(outcome)
                progress.update(bar, completed=tally.done, note=f"{tally.failed} failed  {tally.rate()}")

            await run_batch(
                reached.client,
                read_lines(raw_lines),
                results,
                concurrency=concurrency,
                ended=count,
                model=reached.model,
            )


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )
