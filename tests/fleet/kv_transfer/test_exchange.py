"""Blocks between an exporter and an importer over real sockets and shared memory, and peers that are lost or lie."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from headrace.core.peers import Inquiry, Offer
from headrace.fleet.kv_transfer import wire
from headrace.fleet.kv_transfer.exporter import Exporter, Published
from headrace.fleet.kv_transfer.link import Importer, Link, PeerLost
from headrace.fleet.kv_transfer.shared_memory import KVTransfer, SharedMemory

BYTES, SLOTS = 5000, 3
IDENTITY = {
    "fingerprint": "abc",
    "dtype": "float32",
    "block_size": 16,
    "block_bytes": BYTES,
    "layout": "torch",
}
PATIENCE = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content(block: int) -> bytes:
    return bytes((block * 7 + i) % 251 for i in range(BYTES))


def connectors() -> Iterator[KVTransfer]:
    """Those whose packages are installed."""
    yield SharedMemory()
    with suppress(ImportError):
        from headrace.fleet.kv_transfer.nixl import Nixl

        yield Nixl(PATIENCE)


class Scene:
    """An exporter of the blocks 0 to 9, and links to it; what is opened is closed at the end."""

    def __init__(self, stack: ExitStack, transfer: KVTransfer) -> None:
        self._stack = stack
        self._transfer = transfer
        self.while_copying: Callable[[int], None] = lambda block: None
        self.published = Published(self._copy)
        for number in range(10):
            self.published.stored(None, key(number), (), number)
        self.now = 100.0

    def _copy(self, block: int, target: memoryview) -> None:
        self.while_copying(block)
        target[:] = content(block)

    def exporter(self, port: int = 0, secret: bytes = b"s", **identity: object) -> Exporter:
        exporter = Exporter(
            self._transfer,
            self.published,
            IDENTITY | identity,
            secret,
            host="127.0.0.1",
            port=port,
            slots=SLOTS,
            slot_bytes=BYTES,
        )
        self._stack.callback(exporter.close)
        return exporter

    def link(self, port: int, timeout: float = PATIENCE) -> Link:
        link = Link(
            "127.0.0.1",
            port,
            self._transfer,
            IDENTITY,
            b"s",
            block_bytes=BYTES,
            timeout=timeout,
            clock=lambda: self.now,
        )
        self._stack.callback(link.close)
        return link

    def importer(self, *links: Link, timeout: float = PATIENCE) -> Importer:
        importer = Importer(links, timeout)
        self._stack.callback(importer.close)
        return importer

    def silent_server(self) -> int:
        """The port of a server that accepts connections and never says anything."""
        server = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(params=connectors(), ids=lambda transfer: transfer.name)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, request.param)


def read(link: Link, *numbers: int) -> list[bytes | None]:
    targets = [bytearray(BYTES) for _ in numbers]
    there = link.read([key(number) for number in numbers], [memoryview(target) for target in targets])
    return [bytes(target) if ok else None for target, ok in zip(targets, there, strict=True)]


def answer_of(inquiry: Inquiry) -> Offer:
    until = time.monotonic() + PATIENCE
    while inquiry.answer is None:
        assert time.monotonic() < until, "no answer"
        time.sleep(0.001)
    return inquiry.answer


def pull(importer: Importer, *numbers: int) -> list[bytes | None]:
    """Pull the blocks that were assigned to these numbers."""
    targets = [bytearray(BYTES) for _ in numbers]
    ended: dict[int, bool] = {}
    done = threading.Event()

    def end(i: int, ok: bool, seconds: float) -> None:
        assert i not in ended, "a copy ends twice"
        ended[i] = ok
        if len(ended) == len(numbers):
            done.set()

    importer.pull(numbers, [memoryview(target) for target in targets], lambda: None, end)
    assert done.wait(PATIENCE)
    return [bytes(target) if ended[i] else None for i, target in enumerate(targets)]


def asked(importer: Importer, *numbers: int, peer: str = "") -> Offer:
    inquiry = Inquiry(peer, b"", [key(number) for number in numbers], ())
    importer.ask(inquiry)
    return answer_of(inquiry)


def test_what_is_published_is_found_and_read(scene):
    link = scene.link(scene.exporter().port)
    assert link.find([key(0), key(1), key(99), key(2)]) == 2
    assert read(link, 1, 99, 0) == [content(1), None, content(0)]
    assert read(link, *range(10)) == [content(block) for block in range(10)], "more than there are slots"


def test_a_block_that_changes_while_it_is_copied_is_not_there(scene):
    link = scene.link(scene.exporter().port)
    scene.while_copying = lambda block: block == 4 and scene.published.removed(key(4))
    assert read(link, 3, 4, 5) == [content(3), None, content(5)]
    scene.while_copying = lambda block: block == 5 and scene.published.stored(None, key(5), (), 5)
    assert read(link, 5) == [None], "it was gone for a moment"
    assert read(link, 6) == [content(6)]


def test_a_reset_cache_holds_nothing(scene):
    link = scene.link(scene.exporter().port)
    scene.published.cleared()
    assert link.find([key(0)]) == 0
    assert read(link, 0) == [None]


@pytest.mark.parametrize(
    ("differs", "line"),
    [
        ({"secret": b"other"}, "the secret differs (--kv-transfer-secret)"),
        ({"fingerprint": "xyz"}, "the servers differ in weights"),
        ({"dtype": "bfloat16"}, "the servers differ in the type of the KV cache: 'bfloat16' and 'float32'"),
        ({"block_size": 32}, "the servers differ in block size: 32 and 16"),
        ({"layout": "cpp"}, "the servers differ in the layout of blocks: 'cpp' and 'torch'"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_in_one_line(scene, caplog, differs, line):
    link = scene.link(scene.exporter(**differs).port)
    for _ in range(2):
        with pytest.raises(PeerLost):
            link.find([key(0)])
        scene.now += 100
    said = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert said == [f"peer {link.name} of the KV transfer is not used: {line}"], "once, not at every attempt"


def test_an_importer_refuses_an_exporter_that_does_not_know_the_secret(scene):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def lie() -> None:
            connection, _ = server.accept()
            with connection:
                wire.send(connection, {"headrace_kv": wire.VERSION, "nonce": "1"})
                wire.receive(connection)
                reported = IDENTITY | {"facts": {"slots": 1, "area": None}}
                wire.send(
                    connection,
                    {"identity": reported, "proof": wire.proof(b"guess", "exporter", "1", reported)},
                )

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(PeerLost, match="its secret differs"):
            scene.link(server.getsockname()[1]).find([key(0)])
        thread.join(PATIENCE)


def test_another_version_of_the_protocol_is_refused(scene):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                wire.send(connection, {"headrace_kv": 99, "nonce": "1"})

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(PeerLost, match="version 99 of the protocol, not 1"):
            scene.link(server.getsockname()[1]).find([key(0)])
        thread.join(PATIENCE)


def test_a_client_without_the_secret_gets_no_data(scene):
    exporter = scene.exporter()
    wrong = {"proof": "0" * 64, "identity": IDENTITY, "nonce": "1"}
    for first in (wrong, {}, {"proof": None}, {"proof": "é\ud800"}):
        with socket.create_connection(("127.0.0.1", exporter.port), timeout=PATIENCE) as client:
            greeting, _ = wire.receive(client)
            assert greeting.keys() == {"headrace_kv", "nonce"}
            wire.send(client, first)
            assert wire.receive(client) == ({"refused": "the secret differs (--kv-transfer-secret)"}, b"")
            with pytest.raises(ConnectionError):
                wire.receive(client)


@pytest.mark.parametrize("message", [b"\xff" * 8, b"\x03\0\0\0\0\0\0\0{!}", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_message_ends_its_connection_alone(scene, message):
    exporter = scene.exporter()
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=PATIENCE) as client:
        wire.receive(client)
        client.sendall(message)
        with pytest.raises(ConnectionError):
            wire.receive(client)
    assert scene.link(exporter.port).find([key(0)]) == 1


def test_the_peer_that_holds_most_is_the_answer(scene):
    first, second = scene.exporter(), scene.exporter()
    importer = scene.importer(scene.link(first.port), scene.link(second.port))
    offer = asked(importer, 0, 1, 99)
    assert offer.blocks == 2
    assert offer.peer in importer.peers
    importer.assign(40, offer.peer, key(1))
    importer.assign(41, importer.peers[1], key(2))
    assert pull(importer, 40, 41) == [content(1), content(2)]
    named = asked(importer, 0, peer=importer.peers[1])
    assert named.peer == importer.peers[1]
    assert asked(importer, 99, peer=importer.peers[1])[:2] == (importer.peers[1], 0), "it is there"
    assert asked(importer, 0, peer="10.0.0.1:1")[:2] == ("", 0)


def test_a_hung_peer_is_waited_for_once_and_then_left_alone(scene):
    link = scene.link(scene.silent_server(), timeout=0.05)
    importer = scene.importer(link, scene.link(scene.exporter().port))
    assert asked(importer, 0, 1).blocks == 2, "the other one answers"
    importer.assign(1, link.name, key(1))
    assert pull(importer, 1) == [None]
    assert link.resting
    assert asked(importer, 0, peer=link.name)[:2] == ("", 0)


def test_a_slow_peer_fails_what_comes_too_late(scene):
    released = threading.Event()
    link = scene.link(scene.exporter().port, timeout=3.0)  # a busy machine needs time to connect
    importer = scene.importer(link)
    for number in range(6):
        importer.assign(number, link.name, key(number))
    assert asked(importer, 0).blocks == 1
    scene.while_copying = lambda block: block == 4 and released.wait(PATIENCE)
    assert pull(importer, *range(6)) == [content(0), content(1), content(2), None, None, None]
    released.set()


def test_a_peer_that_is_lost_in_the_middle_fails_what_it_has_not_delivered(scene):
    def break_off(block: int) -> None:
        if block == 7:
            raise ConnectionError

    link = scene.link(scene.exporter().port)
    importer = scene.importer(link)
    for number in range(10):
        importer.assign(number, link.name, key(number))
    scene.while_copying = break_off
    assert pull(importer, *range(10)) == [content(block) for block in range(6)] + [None] * 4
    assert link.resting
    scene.while_copying = lambda block: None
    assert pull(importer, 0) == [None], "it rests"
    scene.now += 100
    assert pull(importer, 0, 9) == [content(0), content(9)], "it has come back"


def test_shared_memory_of_something_else_is_not_read():
    transfer = SharedMemory()
    area = transfer.register(SLOTS, BYTES)
    area.slot(2)[:] = content(1)
    target = bytearray(BYTES)
    transfer.attach(area.describe(), BYTES).read([2], [memoryview(target)])
    assert bytes(target) == content(1)
    described = dict(area.describe())
    with pytest.raises(Exception, match="is not its memory"):
        transfer.attach(described | {"mark": "00" * 16}, BYTES)
    with pytest.raises(Exception, match="cannot be opened"):
        transfer.attach(described | {"file": 99_999}, BYTES)
    area.close()
