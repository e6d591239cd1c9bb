"""Progress of long commands: a line on the terminal after two seconds; nothing if stderr is not a terminal.

The work runs on the main thread. A second thread reads its progress twice a second, to keep the overhead on measured
work small.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

AFTER_SECONDS = 2.0
EVERY_SECONDS = 0.5

T = TypeVar("T")


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
