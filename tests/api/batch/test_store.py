from pathlib import Path

import pytest

from headrace.api.batch.store import (
    NEXT,
    BatchRecord,
    BatchStatus,
    BatchStore,
    Contents,
    FileInUse,
    FileRecord,
    Limits,
    NotFound,
    QuotaExceeded,
    Totals,
    batch_from_json,
    service_class,
    window_seconds,
)

LIMITS = Limits(files=3, nbytes=100, batches=2)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "db", LIMITS)


def file(
    id: str, tenant: str = "t", nbytes: int = 10, expires_at: int | None = None, purpose: str = "batch"
) -> FileRecord:
    return FileRecord(id, tenant, f"{id}.jsonl", purpose, nbytes, 1000, expires_at)


def test_a_tenant_reaches_only_what_is_its_own(store: BatchStore) -> None:
    store.add_file(file("file-1"))
    store.add_batch(batch())
    for call in (
        lambda: store.file("other", "file-1"),
        lambda: store.remove_file("other", "file-1"),
        lambda: store.batch("other", "batch_1"),
        lambda: store.change("other", "batch_1", lambda each: each),
        lambda: store.add_batch(batch(id="batch_2", tenant="other")),
        lambda: store.files("other", limit=9, after="file-1", purpose=None, newest_first=True),
        lambda: store.batches("other", limit=9, after="batch_1"),
    ):
        with pytest.raises(NotFound):
            call()
    assert store.files("other", limit=9, after=None, purpose=None, newest_first=True) == []
    assert store.batches("other", limit=9, after=None) == []


def test_pages_of_files(store: BatchStore) -> None:
    for number in range(3):
        store.add_file(file(f"file-{number}"))

    def ids(**changes: object) -> list[str]:
        asked = {"limit": 9, "after": None, "purpose": None, "newest_first": True} | changes
        return [each.id for each in store.files("t", **asked)]  # type: ignore[arg-type]

    assert ids() == ["file-2", "file-1", "file-0"]
    assert ids(newest_first=False, limit=2) == ["file-0", "file-1"]
    assert ids(after="file-1") == ["file-0"]
    assert ids(after="file-1", newest_first=False) == ["file-2"]
    assert ids(purpose="batch_output") == []


def test_limits_of_a_tenant(store: BatchStore) -> None:
    store.add_file(file("file-1", nbytes=60))
    with pytest.raises(QuotaExceeded, match="100 bytes"):
        store.add_file(file("file-2", nbytes=41))
    store.add_file(file("file-2", nbytes=40))
    store.add_file(file("file-3", nbytes=0))
    with pytest.raises(QuotaExceeded, match="3 files"):
        store.add_file(file("file-4", nbytes=0))
    store.add_file(file("file-5", tenant="other"))
    store.add_batch(batch(id="batch_1"))
    store.add_batch(batch(id="batch_2"))
    with pytest.raises(QuotaExceeded, match="2 unfinished batches"):
        store.add_batch(batch(id="batch_3"))
    store.change("t", "batch_1", lambda each: each.enter(BatchStatus.FAILED, 1))
    store.add_batch(batch(id="batch_3"))


def test_a_file_that_a_batch_reads_stays(store: BatchStore) -> None:
    store.add_file(file("file-1", expires_at=2000))
    store.add_file(file("file-2", expires_at=2000))
    store.add_batch(batch())
    with pytest.raises(FileInUse):
        store.remove_file("t", "file-1")
    assert store.expire_files(1999) == []
    assert store.expire_files(2000) == ["file-2"]
    store.change("t", "batch_1", lambda each: each.enter(BatchStatus.FAILED, 1))
    assert store.expire_files(2000) == ["file-1"]
    with pytest.raises(NotFound):
        store.file("t", "file-1")


def test_only_uploaded_files_are_input(store: BatchStore) -> None:
    store.add_file(file("file-1", purpose="batch_output"))
    with pytest.raises(NotFound):
        store.add_batch(batch())


def test_a_change_that_fails_changes_nothing(store: BatchStore, tmp_path: Path) -> None:
    store.add_file(file("file-1"))
    store.add_batch(batch())

    def completed(each: BatchRecord) -> BatchRecord:
        return each.enter(BatchStatus.COMPLETED, 1)

    with pytest.raises(ValueError, match="cannot become completed"):
        store.change("t", "batch_1", completed, [file("file-9", purpose="batch_output")])
    assert store.batch("t", "batch_1").status is BatchStatus.VALIDATING
    store.close()
    again = BatchStore(tmp_path / "db", LIMITS)
    assert again.file_ids() == {"file-1"}
    assert [each.id for each in again.open_batches()] == ["batch_1"]


def test_reserved_outputs_have_contents_before_they_are_files(store: BatchStore) -> None:
    store.add_file(file("file-1"))
    store.add_batch(batch())
    store.change(
        "t",
        "batch_1",
        lambda each: each.enter(BatchStatus.IN_PROGRESS, 1, output_file_id="file-o", error_file_id="file-e"),
    )
    assert store.file_ids() == {"file-1", "file-o", "file-e"}
    with pytest.raises(NotFound):
        store.file("t", "file-o")


def test_old_ended_batches_are_forgotten(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.batch.store.REMEMBERED_BATCHES", 3)
    store.add_file(file("file-1"))
    for number in range(6):
        store.add_batch(batch(id=f"batch_{number}"))
        if number:
            store.change("t", f"batch_{number}", lambda each: each.enter(BatchStatus.FAILED, 1))
    assert [each.id for each in store.batches("t", limit=9, after=None)] == [
        "batch_5",
        "batch_4",
        "batch_3",
        "batch_0",
    ]


def test_an_upload_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    contents = Contents(tmp_path / "files")
    upload = contents.upload()
    upload.write(b"ab")
    upload.write(b"c")
    assert not contents.path("file-1").exists()
    upload.sync()
    upload.keep(contents.path("file-1"))
    upload.drop()
    assert contents.path("file-1").read_bytes() == b"abc"
    dropped = contents.upload()
    dropped.write(b"x")
    dropped.drop()
    assert not list((tmp_path / "files" / "uploads").iterdir())


def test_what_a_killed_server_left_is_deleted(tmp_path: Path) -> None:
    contents = Contents(tmp_path)
    contents.upload().write(b"half")
    contents.path("file-1").write_bytes(b"1")
    contents.path("file-2").write_bytes(b"2")
    contents.tidy({"file-1"})
    assert not list((tmp_path / "uploads").iterdir())
    assert contents.path("file-1").exists()
    assert not contents.path("file-2").exists()


def test_one_server_uses_a_folder(tmp_path: Path) -> None:
    contents = Contents(tmp_path)
    with pytest.raises(OSError, match="another server uses"):
        Contents(tmp_path)
    contents.close()
    Contents(tmp_path).close()


def test_others_on_the_machine_cannot_read_it(tmp_path: Path) -> None:
    Contents(tmp_path / "files")
    assert (tmp_path / "files").stat().st_mode & 0o077 == 0


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
