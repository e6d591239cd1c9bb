"""Output of commands: tables on the terminal, and one-line errors for files that cannot be written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headrace.config import Options

if TYPE_CHECKING:
    from headrace.lab.bench.report import Run
    from headrace.lab.workload.dataset import Dataset

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer

from headrace.config import ConfigError

T = TypeVar("T")

WIDEST = 400
"""Width of tables in columns if output is a file or a pipe."""


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Context manager that reports an error of writing to ``path`` under the name of ``flag``.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from None


def show(*what: Any) -> None:
    """Prints tables and lines; tables are not narrowed if standard output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=WIDEST)
    for each in what:
        console.print(each, markup=False)


def written(path: Path) -> None:
    """Prints that a file was written."""
    typer.echo(f"written: {path}")


def plotted(flag: str, path: Path, plot: Callable[[], T]) -> T | tuple[()]:
    """Returns what ``plot`` returns; without matplotlib, prints what to install and returns nothing.

    Raises:
        ConfigError: ``path`` cannot be written; the error names the flag.
    """
    from headrace.plots import NoPlots

    try:
        with writing(flag, path), progress("plotting"):
            return plot()
    except NoPlots as missing:
        show(str(missing))
        return ()


def check_export(path: Path | None) -> None:
    """Checks ``--export`` before the work begins.

    Raises:
        ConfigError: the file name does not end in .csv or .parquet, or pyarrow is missing.
    """
    from headrace.lab.bench.report import BadExport, check_rows

    if path is None:
        return
    try:
        check_rows(path)
    except BadExport as error:
        raise ConfigError(f"--export {path}: {error}") from None


def export(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Writes one row per request, if ``--export`` was given."""
    from headrace.lab.bench.report import write_rows

    if path is None:
        return
    with writing("--export", path), progress(f"writing {path}"):
        write_rows(path, rows)
    written(path)


AFTER_SECONDS = 2.0
EVERY_SECONDS = 0.5


class Meter:
    """The progress of one task: ``text`` names its current part, ``done`` is the count.

    If ``read`` is set, it returns the count instead.
    """

    def __init__(self, text: str, total: float | None = None) -> None:
        self.text = text
        self.total = total
        self.done = 0.0
        self.read: Callable[[], float] | None = None

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items and counts them."""
        for item in items:
            self.done += 1
            yield item

    @property
    def current(self) -> float:
        return self.done if self.read is None else self.read()


@contextmanager
def progress(text: str, total: float | None = None) -> Iterator[Meter]:
    """Shows ``text`` with a bar of ``total`` (None: with a spinner) while the body runs."""
    meter = Meter(text, total)
    if not sys.stderr.isatty():
        yield meter
        return
    ended = threading.Event()
    shower = threading.Thread(target=_show, args=(meter, ended), daemon=True)
    shower.start()
    try:
        yield meter
    finally:
        ended.set()
        shower.join()


def _show(meter: Meter, ended: threading.Event) -> None:
    if ended.wait(AFTER_SECONDS):
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    counted = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) if meter.total else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *counted, TimeElapsedColumn())
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=sys.stdout.isatty(),  # lines that go into a file must not be taken to the terminal
    )
    with bar:
        task = bar.add_task(meter.text, total=meter.total)
        while not ended.wait(EVERY_SECONDS):
            bar.update(task, description=meter.text, completed=meter.current, total=meter.total)


SHOWN_FAILURES = 3


def report_runs(
    command: str,
    shown: Sequence[Run],
    output: Path | None,
    settings: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
    every: Sequence[Run] | None = None,
    *,
    medians: Mapping[str, Mapping[str, float]] | None = None,
    rows: Path | None = None,
    load: str = "",
) -> None:
    """Prints a table of the runs ``shown``; writes ``every`` run as JSON and as a plot, and requests to ``rows``."""
    from headrace.lab import plots
    from headrace.lab.bench import report

    runs = every or shown
    ratios = (more or {}).get("ratios")
    rounds = len(runs) // len(shown)
    title = f"bench {command}: {load}"
    note = f" (medians of {rounds} rounds)" if ratios and rounds > 1 else ""
    show(report.table(shown, title + note, ratios and {shown[0].target: {}, **ratios}, medians))
    show(*(table for run in shown for table in report.group_tables(run)))
    failed = [record for run in shown for record in run.records if record.error]
    show(*(f"failed: {record.id}: {record.error}" for record in failed[:SHOWN_FAILURES]))
    path = report_path(output, command)
    with progress("writing the report"):
        write(path, report.document(runs, plain(settings), more))
    picture, heading = path.with_suffix(".png"), f"{', '.join(run.target for run in shown)}: {load}"
    plotted("--output", picture, lambda: plots.plot(runs, picture, heading))
    written(path)
    export(rows, report.rows(runs))


def describe(dataset: Dataset, concurrency: int | None = None) -> str:
    """The load in a few words, for titles."""
    rate = "all at once" if math.isinf(dataset.rate) else f"{dataset.rate:g} requests/s"
    if concurrency is not None:
        rate = f"{concurrency} at once"
    return f"{dataset.count} requests of {dataset.name}, {rate}"


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a report's JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    from headrace.lab.bench import report

    with writing("--output", path):
        report.write(path, document)


def report_path(output: Path | None, command: str) -> Path:
    """The report's file: ``--output``, or a file named after command and time."""
    return output or Path("bench-results") / f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def measured_options(given: Options) -> dict[str, Any]:
    """The options that a measurement depends on, without those of the server, which contain API keys."""
    return {"model": given.model, "cache": given.cache, "scheduler": given.scheduler}


def plain(value: Any) -> Any:
    """Dataclasses within ``value`` as dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def refuse_failures(runs: Sequence[Run]) -> None:
    """Ends the command with status 1 if a request failed; call it after reporting."""
    if any(run.summary.failed for run in runs):
        raise typer.Exit(1)
