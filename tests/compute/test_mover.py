"""Blocks on their way between tiers: what arrives is what was sent, in the order that a plan says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from headrace.compute.blockfile import BlockFile
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.shape import ModelShape
from headrace.compute.mover import Copied, Mover
from headrace.core.plan import Arrival, Move, Tier
from tests.compute.model.test_kv import MIXED, SPEC, contents, held, numbered

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


def down(block: int, page: int) -> Move:
    return Move(block, page, DEVICE, HOST)


def up(page: int, block: int) -> Move:
    return Move(page, block, HOST, DEVICE)


def landed(mover: Mover, count: int) -> list[Arrival]:
    arrived: list[Arrival] = []
    for _ in range(400):
        arrived += mover.arrivals(wait=True)
        if len(arrived) >= count:
            return arrived
    raise AssertionError(f"{len(arrived)} of {count} copies have ended")


def whole(kv: PagedKV, block: int) -> torch.Tensor:
    (content,) = contents(kv, [block])
    return content


def on_disk(kv: PagedKV, path: Path, pages: int = 4) -> Mover:
    return Mover(kv, pages, BlockFile(path / "blocks", 4, whole(kv, 0).nbytes))


def test_a_block_comes_back_whole() -> None:
    kv = numbered()
    mover, sent = Mover(kv, 2), whole(kv, 4)
    mover.move([down(4, 1), Move(0, 4), up(1, 2)])
    assert torch.equal(whole(kv, 2), sent)
    assert held(kv) == [0, 1, 4, 3, 0, 5]
    assert held(kv, layer=1) == [0, 1, 4, 3, 0, 5]
    assert mover.host_bytes == 2 * sent.nbytes


@pytest.mark.parametrize(
    ("moves", "after"),
    [
        ([down(0, 0), Move(1, 0), up(0, 1)], [1, 0, 2, 3, 4, 5]),
        ([down(0, 0), down(1, 0), up(0, 2)], [0, 1, 1, 3, 4, 5]),
        ([down(0, 0), up(0, 5), down(1, 0), up(0, 4)], [0, 1, 2, 3, 1, 0]),
        ([down(0, 0), up(0, 1), down(1, 1), up(1, 2)], [0, 0, 0, 3, 4, 5]),
    ],
)
def test_moves_act_one_after_the_other(moves: list[Move], after: list[int]) -> None:
    kv = numbered()
    Mover(kv, 2).move(moves)
    assert held(kv) == after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [SPEC.shape, MIXED], ids=["one shape", "three shapes"])
def test_over_the_disk_and_back(tmp_path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    kv = PagedKV(shape, 4, 4, dtype)
    kv.write_blocks([3], [torch.randint(-99, 99, (kv.block_elements,)).to(dtype)])
    mover, sent = on_disk(kv, tmp_path), whole(kv, 3)
    write = Move(1, 2, HOST, DISK)
    mover.move([down(3, 1), write])
    (arrival,) = landed(mover, 1)
    assert (arrival.move, arrival.ok) == (write, True)
    mover.move([Move(2, 0, DISK, HOST)])
    assert landed(mover, 1)[0].ok
    mover.move([up(0, 1)])
    assert torch.equal(whole(kv, 1), sent)
    assert not mover.arrivals()
    mover.close()


def test_a_block_of_the_device_is_saved_as_it_was_in_its_turn(tmp_path: Path) -> None:
    kv = numbered()
    mover, sent = on_disk(kv, tmp_path), whole(kv, 5)
    mover.move([Move(5, 0, DEVICE, DISK), Move(1, 5)])
    landed(mover, 1)
    mover.move([Move(0, 0, DISK, HOST)])
    landed(mover, 1)
    mover.move([up(0, 2)])
    assert torch.equal(whole(kv, 2), sent)
    mover.close()


def test_a_damaged_block_is_reported_without_an_exception(tmp_path: Path) -> None:
    kv = numbered()
    mover = on_disk(kv, tmp_path)
    mover.move([down(1, 0), Move(0, 3, HOST, DISK)])
    landed(mover, 1)
    with (tmp_path / "blocks").open("r+b") as file:
        file.seek(3 * whole(kv, 0).nbytes + 9)
        file.write(b"\xff")
    mover.move([Move(3, 1, DISK, HOST)])
    assert [arrival.ok for arrival in landed(mover, 1)] == [False]
    mover.close()


def test_a_full_disk_is_reported_without_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = numbered()
    mover = on_disk(kv, tmp_path)

    def full(self: BlockFile, slot: int, content: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFile, "write", full)
    mover.move([down(1, 0), Move(0, 3, HOST, DISK), Move(2, 1, DEVICE, DISK)])
    assert [arrival.ok for arrival in landed(mover, 2)] == [False, False]
    mover.move([Move(3, 0, DISK, HOST)])
    assert [arrival.ok for arrival in landed(mover, 1)] == [False], "nothing is there"
    mover.close()


def test_a_slow_write_does_not_hold_up_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = numbered()
    mover = on_disk(kv, tmp_path)
    mover.move([down(1, 0), Move(0, 0, HOST, DISK)])
    landed(mover, 1)
    gate, real = threading.Event(), BlockFile.write

    def slow(self: BlockFile, slot: int, content: memoryview) -> int:
        gate.wait(60)
        return real(self, slot, content)

    monkeypatch.setattr(BlockFile, "write", slow)
    write, read = Move(0, 1, HOST, DISK), Move(0, 2, DISK, HOST)
    mover.move([write, read])
    assert [arrival.move for arrival in landed(mover, 1)] == [read]
    gate.set()
    assert [arrival.move for arrival in landed(mover, 1)] == [write]
    mover.close()


def test_a_copy_has_arrived_when_all_ranks_have_their_part(tmp_path: Path) -> None:
    kv = numbered()
    mover = Mover(kv, 3, BlockFile(tmp_path / "blocks", 4, whole(kv, 0).nbytes), ranks=2)
    write, read = Move(0, 3, HOST, DISK), Move(3, 1, DISK, HOST)

    def copy(move: Move, checksum: int | None) -> bool:
        mover.move([move])
        mover.heard(1, Copied(move, checksum, 500.0))
        (arrival,) = landed(mover, 1)
        assert (arrival.move, arrival.seconds) == (move, 500.0)
        return arrival.ok

    mover.move([down(1, 0)])
    assert copy(write, 77)
    assert copy(read, 77)
    assert not copy(read, 78), "the other rank has other content"
    assert not copy(read, None)
    assert not copy(write, None)
    assert not copy(read, 77), "it was not written whole"
    mover.move([write])
    mover.restart()
    assert copy(write, 77), "what was under way when the ranks started again has no end"
    assert mover.arrivals() == ()
    mover.close()


def test_waiting_ends_when_nothing_comes() -> None:
    mover = Mover(numbered(), 1)
    assert mover.arrivals(wait=True) == ()
    mover.move([])


def test_a_way_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="disk to device"):
        Mover(numbered(), 1).move([Move(0, 0, DISK, DEVICE)])


def test_the_host_speed_is_measured_on_the_pages_that_are_there() -> None:
    assert Mover(numbered(2), 1).host_speed() > 0


class Peers:
    """Sends the content of a block, or nothing, on a thread."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def pull(
        self,
        blocks: Sequence[int],
        targets: Sequence[memoryview],
        ready: Callable[[], None],
        ended: Callable[[int, bool, float], None],
    ) -> None:
        def send() -> None:
            ready()
            for i, block in enumerate(blocks):
                if block != 9:
                    targets[i][:] = self._content
                ended(i, block != 9, 0.5)

        threading.Thread(target=send).start()


def test_blocks_of_peers_arrive_in_pages_of_the_host() -> None:
    kv = numbered()
    sent = whole(kv, 3)
    content = bytearray(sent.nbytes)
    kv.copy_out(3, memoryview(content))
    mover = Mover(kv, 3, peers=Peers(bytes(content)))
    came, lost = Move(7, 1, Tier.PEER, HOST), Move(9, 2, Tier.PEER, HOST)
    mover.move([came, lost])
    assert landed(mover, 2) == [Arrival(came, True, 0.5), Arrival(lost, False, 0.5)]
    mover.move([up(1, 0)])
    assert torch.equal(whole(kv, 0), sent)
    with pytest.raises(ValueError, match="not moved from peer to host"):
        Mover(kv, 3).move([came])
