"""A folder that the previous process still holds is waited for, and only so long."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headrace.api.batch.store import Contents
from headrace.service import takeover
from headrace.service.takeover import when_free


def test_a_free_folder_is_taken_at_once() -> None:
    assert when_free(lambda: 7, 0.0, "folder") == 7


def test_a_folder_is_taken_when_its_holder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "RETRY_SECONDS", 0.001)
    first = Contents(tmp_path)
    tried = threading.Event()

    def take() -> Contents:
        try:
            return Contents(tmp_path)
        finally:
            tried.set()

    def end() -> None:
        tried.wait(60)
        first.close()

    ending = threading.Thread(target=end)
    ending.start()
    when_free(take, 60.0, str(tmp_path)).close()
    ending.join()


def test_a_folder_that_is_never_free_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "RETRY_SECONDS", 0.001)
    first = Contents(tmp_path)
    for seconds in (0.0, 0.01):
        with pytest.raises(BlockingIOError, match="another server uses"):
            when_free(lambda: Contents(tmp_path), seconds, str(tmp_path))
    first.close()


def test_other_errors_are_not_waited_for() -> None:
    def take() -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        when_free(take, 60.0, "folder")
