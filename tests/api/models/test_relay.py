"""The client against a server that sends prescribed bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.api.models.relay import Lost, ModelClient

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Own: a\r\n\r\nhi"


class Peer:
    """Answers each request with the next of ``answers``; an empty one closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = b""
                if b"chunked" in head:
                    while not body.endswith(b"0\r\n\r\n"):
                        body += await reader.read(1 << 16) or b"0\r\n\r\n"
                elif b"content-length: " in head:
                    body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                self.requests.append(head + body)
                answer = self.answers.pop(0)
                writer.write(answer)
                if not answer or b"100 bytes" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


def talk(tmp_path, peer: Peer, say: Callable[[ModelClient], Awaitable[object]]) -> object:
    async def run() -> object:
        path = str(tmp_path / "peer")
        server = await asyncio.start_unix_server(peer.serve, path)
        client = ModelClient(path)
        try:
            return await asyncio.wait_for(say(client), 10)
        finally:
            client.close()
            server.close()

    return asyncio.run(run())


async def asked(client: ModelClient, body: bytes = b"", method: str = "POST"):
    headers = [(b"content-length", b"%d" % len(body))] if body else []
    reply = await client.send(method, b"/x?y=1", headers, body)
    try:
        return reply.status, reply.headers, await reply.whole()
    finally:
        reply.close()


def test_connections_are_kept(tmp_path):
    peer = Peer(OK, OK)

    async def twice(client):
        return [await asked(client, b"one"), await asked(client, b"two")]

    expected = (200, [(b"content-length", b"2"), (b"x-own", b"a")], b"hi")
    assert talk(tmp_path, peer, twice) == [expected, expected]
    assert peer.connections == 1
    assert peer.requests[0] == b"POST /x?y=1 HTTP/1.1\r\ncontent-length: 3\r\n\r\none"


def test_a_kept_connection_that_was_closed_is_replaced(tmp_path):
    peer = Peer(OK, b"", OK)

    async def twice(client):
        await asked(client)
        return await asked(client, b"two")

    assert talk(tmp_path, peer, twice)[0] == 200
    assert peer.connections == 2
    assert peer.requests[1] == peer.requests[2]


def test_a_new_connection_without_an_answer_is_lost(tmp_path):
    peer = Peer(b"", OK)
    with pytest.raises(Lost):
        talk(tmp_path, peer, asked)
    assert peer.connections == 1


def test_no_process_listens(tmp_path):
    with pytest.raises(Lost):
        asyncio.run(asked(ModelClient(str(tmp_path / "none"))))


def test_a_body_that_ends_early_is_lost(tmp_path):
    peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n100 bytes")
    with pytest.raises(Lost):
        talk(tmp_path, peer, asked)


def test_chunks_and_a_head_that_announces_another(tmp_path):
    chunks = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n"
    peer = Peer(chunks + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", OK)

    async def twice(client):
        return await asked(client), await asked(client)

    one, two = talk(tmp_path, peer, twice)
    assert (one[0], one[2], two[2]) == (201, b"abc", b"hi")
    assert peer.connections == 1


def test_a_response_to_head_has_no_body(tmp_path):
    peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
    assert talk(tmp_path, peer, lambda client: asked(client, method="HEAD"))[2] == b""


def streamed(client: ModelClient, pieces):
    return client.send("POST", b"/", [(b"transfer-encoding", b"chunked")], pieces)


def test_a_streamed_body(tmp_path):
    peer = Peer(OK)

    async def pieces():
        for each in (b"ab", b"", b"c"):
            yield each

    async def run(client):
        reply = await streamed(client, pieces())
        return await reply.whole()

    assert talk(tmp_path, peer, run) == b"hi"
    assert peer.requests[0].endswith(b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")


def test_a_streamed_body_that_breaks_off_is_not_complete(tmp_path):
    peer = Peer(OK)

    async def pieces():
        yield b"ab"
        raise RuntimeError("the client has gone")

    with pytest.raises(Lost):
        talk(tmp_path, peer, lambda client: streamed(client, pieces()))
    assert not peer.requests or b"c\r\n" not in peer.requests[0]
