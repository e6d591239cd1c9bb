"""The room for connections within a limit of open files."""

import resource

import pytest

from headrace.api.runtime import open_files
from headrace.api.runtime.open_files import ConnectionRoom, open_room


@pytest.mark.parametrize(
    ("limit", "others", "most"), [(1024, 24, 872), (65_536, 36, 65_244), (20, 10, 8), (10, 10, 1)]
)
def test_some_files_stay_free_for_others(limit: int, others: int, most: int) -> None:
    room = ConnectionRoom(limit, others, lambda: 0.0)
    assert room.admits(most)
    assert not room.admits(most + 1)


def test_the_log_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 59.0, 60.0, 61.0])
    room = ConnectionRoom(100, 20, lambda: next(times))
    for _ in range(5):
        assert not room.admits(101)
    assert len(caplog.records) == 2
    assert "100 are open, and the limit of open files is 100; raise it with ulimit -n" in caplog.text


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, open_files.WANTED_FILES),
        (1024, 1 << 20, open_files.WANTED_FILES),
        (1 << 20, 1 << 20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int | None
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: given.append(pair))
    open_room(lambda: 0.0)
    assert given == ([] if wanted is None else [(wanted, hard)])
