"""The terminal of an offline run: Ctrl-C between steps, and a progress bar."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_BAR = threading.Lock()
"""Rich shows one live display of a terminal at a time."""


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the yielded function is called: inside a step it would leave a plan half executed.

    A second Ctrl-C takes effect at once, in case a step hangs. Only Python's own handler is deferred, and only in the
    main thread, which is the one that it interrupts.
    """
    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    deferred = False

    def defer(number: int, frame: FrameType | None) -> None:
        nonlocal deferred
        if deferred:
            signal.default_int_handler(number, frame)
        deferred = True

    def raise_deferred() -> None:
        if deferred:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, defer)
    try:
        yield raise_deferred
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def progress_bar(total: int, shown: bool, what: str = "generating") -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of tokens of each finished request.

    Calls of several threads show one bar: that of the first, until it ends.
    """
    if not shown or not _BAR.acquire(blocking=False):
        yield lambda tokens: None
        return
    try:
        with _shown_bar(total, what) as advance:
            yield advance
    finally:
        _BAR.release()


@contextmanager
def _shown_bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), transient=True) as bar:
        task = bar.add_task(what, total=total, speed="")
        began = time.monotonic()
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            speed = done / max(time.monotonic() - began, 1e-9)
            bar.update(task, advance=1, speed=f"{speed:.0f} tok/s")

        yield advance
