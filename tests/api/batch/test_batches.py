import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.api.batch import batches as module
from headrace.api.batch import runs
from headrace.api.batch.batches import UPLOADS, Batches
from headrace.api.batch.store import (
    BatchRecord,
    BatchStatus,
    FileInUse,
    Limits,
    NotFound,
    QuotaExceeded,
    Totals,
)
from tests.api.batch.server import (
    LIMITS,
    Clock,
    FakePort,
    add_file,
    batches_in,
    begin,
    input_lines,
    results,
    until,
    when,
)

Scene = Callable[[Batches, FakePort, Clock], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.002)
    monkeypatch.setattr(runs, "FIRST_WAIT_SECONDS", 0.0)


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scene], None]:
    """Run a scene with the batches of a folder."""

    def run(scene: Scene, limits: Limits = LIMITS) -> None:
        async def main() -> None:
            port, clock = FakePort(), Clock()
            batches = batches_in(tmp_path, port, clock, limits)
            batches.start()
            try:
                await scene(batches, port, clock)
            finally:
                await batches.stop()

        asyncio.run(main())

    return run


def test_a_batch_ends_with_an_output_and_an_error_file(play, tmp_path: Path) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        id = await begin(batches, input_lines(["a", "bad", "busy", "b"]), output_seconds=3600)
        batch = await until(batches, id, "completed")
        assert (batch.total, batch.totals) == (4, Totals(3, 1, 9, 3, 6))
        assert {"in_progress", "finalizing", "completed"} == batch.times.keys()
        good, bad = results(tmp_path, batch.output_file_id), results(tmp_path, batch.error_file_id)
        assert {each["custom_id"] for each in good} == {"r0", "r2", "r3"}
        assert len({each["id"] for each in good + bad}) == 4
        assert good[0].keys() == {"id", "custom_id", "response", "error"}
        assert good[0]["response"].keys() == {"status_code", "request_id", "body"}
        assert [(each["custom_id"], each["response"]["status_code"], each["error"]) for each in bad] == [
            ("r1", 400, None)
        ]
        file = await batches.file("t", batch.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{id}_output.jsonl")
        assert file.expires_at == clock.now + 3600
        assert port.classes == {"background"}
        assert port.tenants == {"t"}

    play(scene)


def test_a_batch_without_errors_has_no_error_file(play, tmp_path: Path) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        batch = await until(batches, await begin(batches, input_lines(["a"])), "completed")
        assert (batch.has_output, batch.has_errors) == (True, False)
        await when(lambda: not (tmp_path / "contents" / batch.error_file_id).exists())
        with pytest.raises(NotFound):
            await batches.file("t", batch.error_file_id)

    play(scene)


def test_a_file_with_mistakes_fails_before_anything_runs(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        batch = await until(batches, await begin(batches, input_lines(["a"]) * 2 + b"{"), "failed")
        assert [error["code"] for error in batch.errors] == ["duplicate_custom_id", "invalid_json_line"]
        assert not port.ran
        assert not batch.output_file_id

    play(scene)


def test_a_cancelled_batch_keeps_what_it_has(play, tmp_path: Path) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open_lines = 5
        id = await begin(batches, input_lines([str(n) for n in range(20)]))
        await when(lambda: port.running == 4 and not port.open.is_set())
        while (live := await batches.batch("t", id)).totals.completed < len(port.order) - 4:
            await asyncio.sleep(0.002)
        assert live.totals.completed
        assert (await batches.cancel("t", id)).status is BatchStatus.CANCELLING
        batch = await until(batches, id, "cancelled")
        assert batch.totals.completed == live.totals.completed < 20
        errors = results(tmp_path, batch.error_file_id)
        assert len(errors) == 20 - batch.totals.completed
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        assert (await batches.cancel("t", id)).status is BatchStatus.CANCELLED

    play(scene)


def test_a_batch_cancelled_while_it_is_validated_has_no_files(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 1000)

    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        id = await begin(batches, input_lines(["a"]))
        await batches.cancel("t", id)
        batch = await until(batches, id, "cancelled")
        assert not batch.has_output
        assert not port.ran

    play(scene)


def test_a_batch_created_while_others_are_looked_at_is_seen_at_once(play, monkeypatch) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 60.0)

    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        tick, created = batches._tick, []

        async def looked() -> None:
            await tick()
            if not created:
                created.append(await begin(batches, input_lines(["a"])))

        monkeypatch.setattr(batches, "_tick", looked)
        batches._wake.set()
        await when(lambda: bool(batches._runs))
        await until(batches, "batch_0t", "completed")

    play(scene)


def test_an_ended_batch_cannot_be_cancelled(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        id = await begin(batches, input_lines(["a"]))
        await until(batches, id, "completed")
        with pytest.raises(ValueError, match="is completed cannot become cancelling"):
            await batches.cancel("t", id)

    play(scene)


def test_a_batch_expires_at_the_end_of_its_window(play, tmp_path: Path) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open.clear()
        id = await begin(batches, input_lines(["a", "b", "c"]))
        await when(lambda: port.running == 3)
        clock.now += 86_399
        await asyncio.sleep(0.05)
        assert (await batches.batch("t", id)).status is BatchStatus.IN_PROGRESS
        clock.now += 1
        batch = await until(batches, id, "expired")
        errors = results(tmp_path, batch.error_file_id)
        assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 3
        assert batch.totals == Totals()
        assert batch.times["expired"] == int(clock.now)

    play(scene)


def test_near_the_end_of_its_window_a_batch_runs_as_flex(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open.clear()
        id = await begin(batches, input_lines(["a", "b"]))
        await when(lambda: port.running == 2)
        clock.now += 0.8 * 86_400
        await when(lambda: port.classes == {"background", "flex"})
        port.open.set()
        await until(batches, id, "completed")
        assert port.ran == {"a": 2, "b": 2}

    play(scene)


def test_lines_that_wait_for_idle_time_do_not_hold_up_urgent_ones(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.blocked.add("background")
        await begin(batches, input_lines([str(n) for n in range(9)]))
        await when(lambda: port.running == 4)
        urgent = await begin(batches, input_lines(["a", "b"]), tenant="u", window=100)
        clock.now += 80
        await until(batches, urgent, "completed", tenant="u")
        assert port.running == 4

    play(scene)


def test_a_batch_whose_input_was_deleted_on_the_disk_fails(play, tmp_path: Path) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open_lines = 1
        id = await begin(batches, input_lines(["a", "b", "c"]))
        await when(lambda: port.running == 2 and len(port.order) == 3)
        while not (live := await batches.batch("t", id)).totals.completed:
            await asyncio.sleep(0.002)
        batches.contents.remove(live.input_file_id)
        port.stops = True  # so that the run begins again
        await when(lambda: port.running == 0)
        port.stops = False
        batch = await until(batches, id, "failed")
        assert [error["code"] for error in batch.errors] == ["input_file_missing"]
        assert batch.totals.completed == len(results(tmp_path, batch.output_file_id)) == 1
        cancelled = await begin(batches, input_lines(["d"]))
        batches.contents.remove((await batches.batch("t", cancelled)).input_file_id)
        assert (await until(batches, cancelled, "failed")).errors

    play(scene)


def test_a_batch_that_ends_while_another_is_validated_is_left_alone(
    play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    validate = Batches._validate

    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open.clear()
        first = await begin(batches, input_lines(["a"]))
        await when(lambda: port.running == 1)

        async def slowly(self: Batches, batch: BatchRecord) -> None:
            port.open.set()
            await when(lambda: not batches._runs)
            await validate(self, batch)

        monkeypatch.setattr(Batches, "_validate", slowly)
        second = await begin(batches, input_lines(["b"]), tenant="u")
        await until(batches, second, "completed", tenant="u")
        batch = await until(batches, first, "completed")
        await asyncio.sleep(0.05)
        assert not (tmp_path / "contents" / batch.error_file_id).exists()

    play(scene)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_lines_run_in_the_order_of_shared_prefixes(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        prompts = [f"{'xyz'[n % 3] * 200} {n}" for n in range(12)]
        await until(batches, await begin(batches, input_lines(prompts)), "completed")
        groups = [int(name[1:]) % 3 for name in port.order]
        assert sum(a != b for a, b in pairwise(groups)) == 2

    play(scene)


def test_tenants_take_turns_and_lines_are_bounded_together(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open.clear()
        first = await begin(batches, input_lines(["a"] * 6))
        second = await begin(batches, input_lines(["c"] * 6))
        other = await begin(batches, input_lines(["b"] * 6), tenant="u")
        await when(lambda: port.running == 4)
        await asyncio.sleep(0.05)
        assert port.most_running == 4
        port.open.set()
        await until(batches, first, "completed")
        await until(batches, second, "completed")
        await until(batches, other, "completed", tenant="u")
        assert port.tenants == {"t", "u"}
        with pytest.raises(NotFound):
            await batches.batch("t", other)

    play(scene)


def test_a_server_that_shuts_down_lets_its_lines_go(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open.clear()
        id = await begin(batches, input_lines(["a", "b"]))
        await when(lambda: port.running == 2)
        port.stops = True
        await when(lambda: port.running == 0)
        assert (await batches.batch("t", id)).status is BatchStatus.IN_PROGRESS

    play(scene)


def test_a_batch_is_tried_again_after_a_failure_of_the_server(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.broken = True
        id = await begin(batches, input_lines(["a"]))
        await when(lambda: id in batches._rest_until)
        await asyncio.sleep(0.05)
        assert port.ran["a"] == 1  # it rests
        port.broken = False
        clock.now += module.RETRY_SECONDS + 1
        await until(batches, id, "completed")

    play(scene)


def test_limits_of_uploads(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        await add_file(batches, b"x" * 90)
        with pytest.raises(QuotaExceeded, match="100 bytes"):
            await add_file(batches, b"x" * 20)
        await add_file(batches, b"x" * 10)
        with pytest.raises(QuotaExceeded, match="2 files"):
            await add_file(batches, b"")
        await add_file(batches, b"x" * 90, tenant="u")
        assert len(list((batches.contents.folder / "contents").iterdir())) == 3
        assert not list((batches.contents.folder / "uploads").iterdir())

    play(scene, Limits(files=2, nbytes=100, batches=1))


def test_lines_do_not_run_once_the_results_reach_the_limit_of_the_tenant(
    play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SYNC_SECONDS", 0.0)
    raw = input_lines(["x" * 400] * 200)
    begun, usages, usage = asyncio.Event(), [], module.BatchStore.usage

    def counted(store: module.BatchStore, tenant: str) -> tuple[int, int]:
        if not begun.is_set():
            return 0, 0  # the limit is reached after 8 lines, and seen after 20
        usages.append(tenant)
        return usage(store, tenant)

    monkeypatch.setattr(module.BatchStore, "usage", counted)

    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open_lines = 20
        id = await begin(batches, raw)
        await when(lambda: len(port.order) > 20)
        begun.set()
        looked = len(usages)
        await when(lambda: len(usages) > looked + 1)
        port.open.set()
        batch = await until(batches, id, "completed")
        assert (batch.total, batch.totals.completed + batch.totals.failed) == (200, 200)
        assert 20 < batch.totals.completed < 30
        assert len(port.order) == batch.totals.completed
        bad = results(tmp_path, batch.error_file_id)
        assert {each["error"]["code"] for each in bad} == {"storage_quota_exceeded"}

    play(scene, LIMITS._replace(nbytes=len(raw) + 4_000))


def test_a_tenant_sends_few_files_at_once(play) -> None:
    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        ready, leave = asyncio.Semaphore(0), asyncio.Event()

        async def send() -> None:
            async with batches.upload("t"):
                ready.release()
                await leave.wait()

        sending = [asyncio.create_task(send()) for _ in range(UPLOADS)]
        for _ in range(UPLOADS):
            await ready.acquire()
        with pytest.raises(QuotaExceeded, match="already sends 4"):
            await add_file(batches, b"x")
        await add_file(batches, b"x", tenant="u")
        leave.set()
        await asyncio.gather(*sending)
        await add_file(batches, b"x")

    play(scene)


def test_files_expire_but_not_while_a_batch_reads_them(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRE_FILES_SECONDS", 0.0)

    async def scene(batches: Batches, port: FakePort, clock: Clock) -> None:
        port.open.clear()
        id = await begin(batches, input_lines(["a"]), window=60 * 86_400)
        file = (await batches.batch("t", id)).input_file_id
        await when(lambda: port.running == 1)
        with pytest.raises(FileInUse):
            await batches.remove_file("t", file)
        clock.now += module.FILE_SECONDS + 1
        await asyncio.sleep(0.05)
        assert (await batches.file("t", file)).id == file
        port.open.set()
        await until(batches, id, "completed")
        await when(lambda: not batches.contents.path(file).exists())
        with pytest.raises(NotFound):
            await batches.file("t", file)

    play(scene)
