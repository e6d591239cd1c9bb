import pytest

from headrace.api.batch.records import (
    NEXT,
    BatchRecord,
    BatchStatus,
    Totals,
    batch_from_json,
    service_class,
    window_seconds,
)


def batch(**changes: object) -> BatchRecord:
    values: dict[str, object] = {
        "id": "batch_1",
        "tenant": "t",
        "endpoint": "/v1/completions",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "window_seconds": 86_400,
        "created_at": 1000,
    }
    return BatchRecord(**(values | changes))  # type: ignore[arg-type]


def test_a_batch_survives_storage() -> None:
    stored = batch(metadata={"a": "ü"}, totals=Totals(1, 2, 3, 4, 5), errors=({"code": "x", "line": 1},))
    stored = stored.enter(BatchStatus.IN_PROGRESS, 1001.9, total=7)
    assert batch_from_json(stored.to_json()) == stored
    assert stored.times == {"in_progress": 1001}


@pytest.mark.parametrize("status", BatchStatus)
def test_only_the_states_of_the_table_follow(status: BatchStatus) -> None:
    for following in BatchStatus:
        if following in NEXT[status]:
            assert batch(status=status).enter(following, 1).status is following
        else:
            with pytest.raises(ValueError, match=f"is {status} cannot become {following}"):
                batch(status=status).enter(following, 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", 86_400),
        ("1m", 60),
        ("7d", 604_800),
        ("8d", None),
        ("0h", None),
        ("24", None),
        ("h", None),
        ("", None),
    ],
)
def test_completion_windows(text: str, seconds: int | None) -> None:
    assert window_seconds(text) == seconds


def test_lines_run_in_the_background_until_the_window_nearly_ends() -> None:
    assert service_class(batch(), 1000) == "background"
    assert service_class(batch(), 1000 + 64_799) == "background"
    assert service_class(batch(), 1000 + 64_800) == "flex"
