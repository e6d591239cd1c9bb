"""Runs the tuner's rehearsals in another process, because the server's interpreter is needed for the engine.

The process runs this file at the lowest priority. It starts with the first rehearsal, and ends when its pipe is closed,
so at the latest with the server.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_curve import StepCurve
from headrace.tuning.tuner.rehearsal import Outcome, Rehearsal, Scene, in_parts

PROGRAM = "headrace.wiring.operations.rehearsals"
LOWEST_PRIORITY = 19
FAILURES = (OSError, EOFError, pickle.UnpicklingError)
"""The errors if the process has ended or cannot be started."""

logger = logging.getLogger("headrace.tuner")


class Rehearsals:
    """Runs one rehearsal at a time, of an engine with this ``overlap``; a `api.app.BackgroundWork`."""

    def __init__(self, overlap: int) -> None:
        self._overlap = overlap
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "rehearsals")  # writing to a full pipe waits

    def start(self) -> None:
        """Do nothing: the process starts with the first rehearsal."""

    async def stop(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=False)
        self._end()

    def run(
        self, scene: Scene, knobs: Knobs, curve: StepCurve, slots: int, static: bool
    ) -> Generator[None, None, Outcome]:
        """Like `in_parts`; if the process fails, `in_parts` runs instead."""
        asked = self._thread.submit(self._ask, (scene, knobs, curve, slots, static, self._overlap))
        while not asked.done():
            yield
        try:
            return asked.result()
        except FAILURES as error:
            logger.warning("the tuner rehearses in the server: %s: %s", type(error).__name__, error)
            return (yield from in_parts(scene, knobs, curve, slots, static, overlap=self._overlap))

    def _ask(self, asked: tuple[Scene, Knobs, StepCurve, int, bool, int]) -> Outcome:
        process, pipe = self._process, subprocess.PIPE
        if process is None:
            command = (sys.executable, "-m", PROGRAM)
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(asked, process.stdin)
            process.stdin.flush()
            outcome: Outcome = pickle.load(process.stdout)
        except FAILURES:
            self._end()
            raise
        return outcome

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def main() -> None:
    """Run the rehearsals that the server sends, until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends with the server's pipe
    os.nice(LOWEST_PRIORITY)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            scene, knobs, curve, slots, static, overlap = pickle.load(source)
        except EOFError:
            return
        outcome = Rehearsal(scene, knobs, curve, slots, static=static, overlap=overlap).run()
        pickle.dump(outcome, target)
        target.flush()


if __name__ == "__main__":
    main()
