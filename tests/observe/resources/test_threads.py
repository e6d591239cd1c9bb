"""CPU time by kind of thread."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from headrace.observe.resources.threads import KINDS, ThreadTimes

TICK = os.sysconf("SC_CLK_TCK")


def write(tasks: Path, thread: int, seconds: float) -> None:
    folder = tasks / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["0"] * 50
    fields[11], fields[12] = str(int(seconds * TICK / 2)), str(int(seconds * TICK / 2))
    (folder / "stat").write_text(f"{thread} (a (strange) name) {' '.join(fields)}")


def test_threads_are_counted_by_kind(tmp_path: Path) -> None:
    write(tmp_path, os.getpid(), 2.0)
    write(tmp_path, 999_999_998, 4.0)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="headrace-engine")
    thread.start()
    try:
        assert thread.native_id is not None
        write(tmp_path, thread.native_id, 6.0)
        seconds = ThreadTimes(tmp_path).seconds()
    finally:
        stop.set()
        thread.join()
    assert seconds == {"engine": 6.0, "event_loop": 2.0, "workers": 0.0, "native": 4.0}


def test_a_thread_that_has_ended_still_counts(tmp_path: Path) -> None:
    times = ThreadTimes(tmp_path)
    write(tmp_path, 999_999_998, 4.0)
    assert times.seconds()["native"] == 4.0
    (tmp_path / "999999998" / "stat").unlink()
    assert times.seconds()["native"] == 4.0
    write(tmp_path, 999_999_998, 2.0)  # the number is used again
    assert times.seconds()["native"] == 6.0
    write(tmp_path, 999_999_998, 8.0)
    assert times.seconds()["native"] == 12.0


def test_this_process() -> None:
    times = ThreadTimes()
    if times.measurable:
        assert set(times.seconds()) == set(KINDS)
    assert not ThreadTimes(Path("/does/not/exist")).measurable
