"""The wire of the load generator against a server that writes exactly these bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from headrace.lab.bench.client import Connections, run_loop

T = TypeVar("T")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\n"


class Scripted:
    """Answers each request with the next of ``answers`` in pieces; after one that ends in None it hangs up."""

    def __init__(self, answers: list[list[bytes | None]]) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self._answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def talk(answers: list[list[bytes | None]], say: Callable[[Connections], Awaitable[T]]) -> tuple[T, Scripted]:
    async def run() -> tuple[T, Scripted]:
        script = Scripted(answers)
        async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connections = Connections(f"http://127.0.0.1:{port}/any")
            try:
                return await asyncio.wait_for(say(connections), 60), script
            finally:
                connections.close()

    return run_loop(run())


async def heard(connections: Connections, body: bytes = b"{}") -> tuple[int, list[tuple[int, bytes]]]:
    pieces: list[tuple[int, bytes]] = []
    status = await connections.post("/x", {"X-A": "1"}, body, lambda code, data: pieces.append((code, data)))
    return status, pieces


def test_each_chunk_is_reported_and_the_connection_is_reused() -> None:
    async def say(connections: Connections) -> list[tuple[int, list[tuple[int, bytes]]]]:
        return [await heard(connections, b"one"), await heard(connections, b"two")]

    chunked: list[bytes | None] = [CHUNKED + b"3\r\nab", b"c\r\n", b"2\r\nde\r\n0\r\n\r\n"]
    reported, script = talk([chunked, [SIZED + b"no", b"ne"]], say)
    assert reported[0][0] == 200
    assert b"".join(data for _, data in reported[0][1]) == b"abcde"
    assert len(reported[0][1]) >= 2  # not held back until all is there
    assert reported[1] == (404, [(404, b"no"), (404, b"ne")])
    assert script.connections == 1
    head, _, body = script.requests[0].partition(b"\r\n\r\n")
    assert body == b"one"
    assert head.startswith(b"POST /x HTTP/1.1\r\n")
    assert b"\r\nX-A: 1" in head
    assert b"\r\nContent-Length: 3" in head


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"HTTP/1.1 200 OK\r\n\r\nall", b" of it", None], "all of it"),  # ends with the connection
        ([b"HTTP/1.1 100 Continue\r\n\r\n", CHUNKED + b"2\r\nok\r\n0\r\n\r\n"], "ok"),
    ],
)
def test_other_ways_to_end(pieces: list[bytes | None], expected: str) -> None:
    (status, reported), _ = talk([pieces], heard)
    assert status == 200
    assert b"".join(data for _, data in reported).decode() == expected


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([CHUNKED + b"5\r\nab", None], "before the end of the response"),
        ([SIZED + b"n", None], "before the end of the response"),
        ([None], "before the end of the response"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP"),
    ],
)
def test_an_answer_without_its_end_is_an_error(pieces: list[bytes | None], error: str) -> None:
    with pytest.raises(ConnectionError, match=error):
        talk([pieces], heard)


def test_what_the_listener_raises_is_the_callers() -> None:
    def fail(status: int, data: bytes) -> None:
        raise LookupError("what is this?")

    async def say(connections: Connections) -> int:
        return await connections.post("/x", {}, b"{}", fail)

    with pytest.raises(LookupError, match="what is this"):
        talk([[CHUNKED + b"1\r\na\r\n0\r\n\r\n"]], say)


def test_a_connection_that_the_server_closed_meanwhile_is_not_used() -> None:
    async def say(connections: Connections) -> list[int]:
        first = (await heard(connections))[0]
        for _ in range(10):  # in several turns of the loop, also after one that took long
            await asyncio.sleep(0.01)
        return [first, (await heard(connections))[0]]

    statuses, script = talk([[SIZED + b"none", None], [SIZED + b"none"]], say)
    assert statuses == [404, 404]
    assert script.connections == 2


@pytest.mark.parametrize(
    ("second", "sent"),
    [
        ([[None], [SIZED + b"none"]], 3),  # the server closed the reused connection when it had the request
        ([[SIZED[:9], None], [SIZED + b"none"]], 2),  # a response had begun
        ([[None], [None], [SIZED + b"none"]], 3),  # the new connection was closed too
    ],
)
def test_a_request_on_a_reused_connection_is_sent_again_once(
    second: list[list[bytes | None]], sent: int
) -> None:
    """Servers close idle connections without a word: a request that was just written is not a failed request."""

    async def say(connections: Connections) -> list[int]:
        statuses = [(await heard(connections))[0]]
        try:
            statuses.append((await heard(connections, b"again"))[0])
        except ConnectionError:
            statuses.append(0)
        return statuses

    statuses, script = talk([[SIZED + b"none"], *second], say)
    assert statuses == [404, 404 if len(second) == 2 and second[0] == [None] else 0]
    assert len(script.requests) == sent
    assert all(request.endswith(b"again") for request in script.requests[1:])


def test_a_request_that_was_given_up_leaves_no_connection_behind() -> None:
    async def say(connections: Connections) -> int:
        answered = asyncio.Event()
        given_up = asyncio.create_task(connections.post("/x", {}, b"{}", lambda *_: answered.set()))
        await answered.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        assert given_up.cancelled()
        return (await heard(connections))[0]

    status, script = talk([[CHUNKED + b"1\r\na\r\n"], [SIZED + b"none"]], say)
    assert status == 404
    assert script.connections == 2


def test_a_header_is_one_line() -> None:
    connections = Connections("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="line breaks"):
        asyncio.run(connections.post("/x", {"X-Tenant-Id": "a\r\nX-B: 2"}, b"", lambda status, data: None))


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://"])
def test_an_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        Connections(url)
