"""Processes of Python, forked from one that has imported the server: their starts take a sixth of the CPU time.

Imports take 1.5 s of the 1.8 s of CPU of a start. The fork server of the standard library imports once for each
process of tests. What a fork does after that is what a process does that was started by name.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["__main__", "torch", "headrace.cli", "headrace.wiring.server", "openai"])
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Read when torch is imported."""


def _become(
    words: list[str], environment: dict[str, str], folder: str, output: Connection, errors: Connection
) -> None:
    """Do what ``python WORDS`` does."""
    for descriptor, to in ((1, output), (2, errors)):
        os.dup2(to.fileno(), descriptor)
        to.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, *rest = words
    sys.path.insert(0, str(Path(first).parent.absolute()) if first.endswith(".py") else folder)
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c"]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.argv = words
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


class Forked:
    """``python WORDS`` with one thread for each operation; what tests need of a `subprocess.Popen`."""

    def __init__(
        self, *words: str, output: int, errors: int, folder: Path | None = None, **environment: str
    ) -> None:
        if forkserver._forkserver._forkserver_pid is None:
            before = dict(os.environ)
            os.environ.update(ONE_THREAD)
            forkserver.ensure_running()
            os.environ.clear()
            os.environ.update(before)
        given = dict(os.environ) | ONE_THREAD | environment
        ends = [Connection(os.dup(each), readable=False) for each in (output, errors)]
        self._process = FORKS.Process(
            target=_become, args=(list(words), given, str(folder or Path.cwd()), *ends)
        )
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    *words: str, folder: Path | None = None, timeout: float = 120.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python WORDS`` from beginning to end."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        forked = Forked(*words, output=output.fileno(), errors=errors.fileno(), folder=folder, **environment)
        try:
            status = forked.wait(timeout)
        finally:
            forked.kill()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(words, status, output.read(), errors.read())
