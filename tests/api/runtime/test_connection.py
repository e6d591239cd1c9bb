"""Limits on a request's head, on real sockets of a uvicorn server with this connection class."""

import asyncio
import gc
import json
import resource
import socket
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import uvicorn

from headrace.api.exchange import PARTS
from headrace.api.runtime import connection
from headrace.api.runtime.connection import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_REQUEST_LINE_BYTES,
    Connection,
    ConnectionRoom,
    Turns,
    open_room,
)


async def echo(scope, receive, send):
    """Answer with the number of headers and of bytes in the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = f"{len(scope['headers'])} {size}".encode()
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def listening(app=echo, most=1000):
    """The address of a server that has room for so many connections."""
    room = ConnectionRoom(most, 0, time.monotonic)
    room._most = most
    connect = partial(Connection, room=room, turns=Turns())
    config = uvicorn.Config(app, http=connect, port=0, lifespan="off", ws="none", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join(60)


@pytest.fixture(scope="module")
def address():
    with listening() as found:
        yield found


@contextmanager
def connected(address):
    with socket.create_connection(address, timeout=60) as client:
        yield client


def answer(client):
    """The head and the body of the next answer."""
    said = b""
    while b"\r\n\r\n" not in said:
        part = client.recv(65536)
        assert part, said
        said += part
    head, _, body = said.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)
    return head, body


def exchange(address, *pieces):
    """Send the pieces; the status, the body, and whether the server closed the connection."""
    with connected(address) as client:
        for piece in pieces:
            client.sendall(piece)
        head, body = answer(client)
        closed = b"connection: close" in head.lower() and client.recv(1) == b""
        return int(head.split()[1]), body, closed


def is_cut_while_sending(client, piece):
    """Whether the server closes the connection while the client sends more and more."""
    client.settimeout(0.05)
    for _ in range(1000):
        try:
            client.sendall(piece)
            if client.recv(1) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def request(*headers, target="/", body=b""):
    lines = [f"POST {target} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error(reported):
    status, body, closed = reported
    assert closed
    return status, json.loads(body)["error"]


def test_a_head_within_the_limits_is_served(address):
    many = [f"x-{number}: y" for number in range(MAX_HEADERS - 2)]
    assert exchange(address, request(*many)) == (200, f"{MAX_HEADERS} 0".encode(), False)
    large = "x: " + "y" * (MAX_HEADER_BYTES - 100)
    assert exchange(address, request(large))[0] == 200
    assert exchange(address, request(target="/" + "p" * (MAX_REQUEST_LINE_BYTES - 1)))[0] == 200


def test_too_many_headers_are_refused_with_the_limit(address):
    many = [f"x-{number}: y" for number in range(MAX_HEADERS - 1)]
    status, reported = error(exchange(address, request(*many)))
    assert (status, reported["code"]) == (431, "headers_too_large")
    assert f"{MAX_HEADERS} headers" in reported["message"]


@pytest.mark.parametrize("count", [1, 40])
def test_too_many_bytes_of_headers_are_refused_with_the_limit(address, count):
    each = "y" * (MAX_HEADER_BYTES // count)
    status, reported = error(exchange(address, request(*(f"x-{number}: {each}" for number in range(count)))))
    assert status == 431
    assert f"{MAX_HEADER_BYTES} bytes" in reported["message"]


def test_a_request_line_that_is_too_long_is_refused_with_the_limit(address):
    status, reported = error(exchange(address, request(target="/" + "p" * MAX_REQUEST_LINE_BYTES)))
    assert (status, reported["code"]) == (414, "uri_too_long")
    assert str(MAX_REQUEST_LINE_BYTES) in reported["message"]


def test_a_header_that_never_ends_is_refused_before_it_fills_the_memory(address):
    begun = b"GET / HTTP/1.1\r\nhost: x\r\nx: "
    status, _ = error(exchange(address, begun, *[b"y" * 10_000] * 5))
    assert status == 431


def test_a_client_that_sends_far_too_much_still_hears_why(address):
    status, _ = error(exchange(address, request("x: " + "y" * 4_000_000)))
    assert status == 431


def test_a_trailer_that_never_ends_is_refused(address):
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nz\r\n0\r\nx: "
    with connected(address) as client:
        client.sendall(head)
        # The application waits for the end of the body and has not answered: the connection is cut.
        assert is_cut_while_sending(client, b"y" * 10_000)


def test_a_large_body_is_no_head(address):
    body = b"z" * 1_000_000
    assert exchange(address, request(body=body)) == (200, b"2 1000000", False)


def test_the_limits_count_for_each_request_of_a_connection(address):
    many = [f"x-{number}: y" for number in range(MAX_HEADERS - 2)]
    with connected(address) as client:
        for _ in range(3):
            client.sendall(request(*many))
            assert answer(client)[0].startswith(b"HTTP/1.1 200")
        client.sendall(request(*many, "x: y"))
        assert answer(client)[0].startswith(b"HTTP/1.1 431")


def test_what_is_no_http_is_a_400_in_the_format_of_all_errors(address):
    status, reported = error(exchange(address, b"NONSENSE\r\n\r\n"))
    assert (status, reported["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("xchunked", b"0\r\n\r\n"),
        ("chunked", b"-2\r\nzz\r\n0\r\n\r\n"),
        ("chunked", b"2\nzz\n0\n\n"),
        ("chunked", b"2\r\nzzzz\r\n0\r\n\r\n"),
        ("chunked", b"0\r\ncontent-length: 5\r\n\r\n"),
    ],
)
def test_a_body_that_is_not_framed_as_announced_is_a_400(address, coding, body):
    head = f"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {coding}\r\n\r\n".encode()
    status, reported = error(exchange(address, head, body))
    assert (status, reported["code"]) == (400, "invalid_http")


def test_the_limits_are_at_least_what_clients_and_proxies_use():
    assert connection.MAX_HEADER_BYTES >= 16_384
    assert connection.MAX_HEADERS >= 100


@pytest.fixture
def impatient(request, monkeypatch):
    """Only limits of time that are named are short, as a busy machine is slow; a body must come at 100 kB/s."""
    names, seconds = request.param
    for name in names.split():
        monkeypatch.setattr(connection, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(connection, "MIN_BODY_RATE", 100_000)


def trickle(client, pieces, pause=0.05):
    """Send the pieces one after the other, until the server answers."""
    for piece in pieces:
        client.sendall(piece)
        client.settimeout(pause)
        try:
            client.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            continue
    client.settimeout(60)
    head, body = answer(client)
    return int(head.split()[1]), body


@pytest.mark.parametrize("impatient", [("IDLE", 0.2)], indirect=True)
def test_a_connection_that_sends_nothing_is_closed(address, impatient):
    with connected(address) as client:
        assert client.recv(1) == b""


@pytest.mark.parametrize("impatient", [("HEAD", 0.5)], indirect=True)
def test_a_head_that_trickles_is_refused(address, impatient):
    with connected(address) as client:
        status, body = trickle(client, [b"GET / HTTP/1.1\r\n", *[b"x: y\r\n"] * 60])
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_too_slow")
        assert "head of the request did not arrive within 0.5 s" in body.decode()
        assert client.recv(1) == b""


@pytest.mark.parametrize("impatient", [("BODY", 0.2)], indirect=True)
def test_a_body_that_trickles_is_refused(address, impatient):
    with connected(address) as client:
        head = request(body=b"x" * 1000)[:-1000]
        status, body = trickle(client, [head, *[b"x"] * 60])
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_too_slow")
        assert "body of the request did not arrive within 0.2 s, or slower than 100000 bytes" in body.decode()
        assert client.recv(1) == b""


@pytest.mark.parametrize("impatient", [("BODY", 1.0)], indirect=True)
def test_a_body_that_is_slow_but_steady_is_served(address, impatient):
    size, pieces = 400_000, 10  # beyond the second that every body has
    with connected(address) as client:
        head = request(body=b"x" * size)[:-size]
        assert trickle(client, [head, *[b"x" * (size // pieces)] * pieces], 0.15) == (200, b"2 400000")


@pytest.mark.parametrize("impatient", [("IDLE HEAD", 1.5)], indirect=True)
def test_the_next_request_of_a_connection_has_its_own_time(address, impatient):
    with connected(address) as client:
        for _ in range(4):
            client.sendall(request())
            assert answer(client)[1] == b"2 0"
            time.sleep(0.5)


def test_a_connection_without_room_gets_an_error_and_the_log_says_why_once(caplog):
    with listening(most=2) as place, connected(place), connected(place):
        time.sleep(0.1)
        for _ in range(2):
            with connected(place) as client:
                head, body = answer(client)
                assert head.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 5" in head
                assert json.loads(body)["error"]["code"] == "too_many_connections"
                assert client.recv(1) == b""
    (record,) = [each for each in caplog.records if "refused" in each.message]
    assert "2 are open, and the limit of open files is 2" in record.message


class Slow:
    """An application that answers when it is told to, and notes which clients have gone."""

    def __init__(self):
        self.go = threading.Event()
        self.gone = threading.Event()
        self.begun = threading.Event()

    async def __call__(self, scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        streamed = scope["path"] == "/stream"
        if streamed:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        self.begun.set()
        left = asyncio.ensure_future(receive())
        while not self.go.is_set() and not left.done():
            await asyncio.sleep(0.01)
            if streamed:
                await send({"type": "http.response.body", "body": b"b", "more_body": True})
        if left.done():
            assert left.result()["type"] == "http.disconnect"
            self.gone.set()
            return
        left.cancel()
        if not streamed:
            head = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def slow():
    app = Slow()
    with listening(app) as place:
        yield app, place
        app.go.set()


def read_all(client):
    said = b""
    while part := client.recv(65536):
        said += part
    return said


@pytest.mark.parametrize("target", ["/", "/stream"])
@pytest.mark.parametrize("wait", [0, 0.4])
def test_a_client_that_closes_its_sending_half_gets_its_whole_answer(slow, target, wait):
    app, address = slow
    with connected(address) as client:
        client.sendall(request(target=target, body=b"z" * 100))
        assert app.begun.wait(60)
        client.shutdown(socket.SHUT_WR)
        threading.Timer(wait, app.go.set).start()
        said = read_all(client)
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert said.endswith(b"\r\n\r\nok" if target == "/" else b"2\r\nok\r\n0\r\n\r\n")
    assert b"\n\n" not in said
    assert not app.gone.is_set()


def test_a_client_of_http_1_0_that_closes_its_sending_half_gets_its_answer(slow):
    app, address = slow
    with connected(address) as client:
        client.sendall(b"POST / HTTP/1.0\r\ncontent-length: 1\r\n\r\nz")
        client.shutdown(socket.SHUT_WR)
        assert app.begun.wait(60)
        app.go.set()
        assert read_all(client).endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("target", ["/", "/stream"])
@pytest.mark.parametrize("half_first", [False, True])
def test_a_client_that_goes_away_is_noticed(slow, target, half_first):
    app, address = slow
    with connected(address) as client:
        client.sendall(request(target=target))
        assert app.begun.wait(60)
        if half_first:
            client.shutdown(socket.SHUT_WR)
            assert not app.gone.wait(0.3)
    assert app.gone.wait(10)


def test_a_client_that_ends_in_the_middle_of_its_body_is_cut(slow):
    app, address = slow
    with connected(address) as client:
        client.sendall(request(body=b"z" * 100)[:-1])
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
    assert not app.begun.is_set()


def test_pipelined_requests_before_the_end_are_all_answered(slow):
    app, address = slow
    app.go.set()
    with connected(address) as client:
        client.sendall(request() * 3)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).count(b"\r\n\r\nok") == 3


def test_pipelined_answers_that_are_read_late_are_whole(slow):
    app, address = slow
    with connected(address) as client:
        client.sendall(request() * 3)
        client.shutdown(socket.SHUT_WR)
        assert app.begun.wait(60)
        time.sleep(0.4)  # the server looks whether the client is still there
        app.go.set()
        time.sleep(0.2)
        said = read_all(client)
    assert said.count(b"\r\n\r\nok") == 3
    assert b"\n\n" not in said


def test_an_error_in_a_later_body_is_no_answer_to_the_request_before_it(slow):
    app, address = slow
    with connected(address) as client:
        client.sendall(request())
        assert app.begun.wait(60)
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n-2\r\n")
        app.gone.wait(0.2)
        app.go.set()
        said = read_all(client)
    assert b" 400 " not in said


def test_a_pipelining_client_that_goes_away_is_noticed(slow):
    app, address = slow
    with connected(address) as client:
        client.sendall(request() * 3)
        assert app.begun.wait(60)
    assert app.gone.wait(10)


def test_an_idle_client_that_closes_its_sending_half_is_closed(slow):
    app, address = slow
    app.go.set()
    with connected(address) as client:
        client.sendall(request())
        answer(client)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


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
        (1024, resource.RLIM_INFINITY, connection.WANTED_FILES),
        (1024, 1 << 20, connection.WANTED_FILES),
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


def test_turns_of_a_step_are_called_together_and_later_ones_in_the_next_iteration():
    called, scheduled = [], []

    class Loop(asyncio.SelectorEventLoop):
        def call_soon(self, callback, *args, **more):
            if getattr(callback, "__self__", None) is turns:
                scheduled.append(list(called))
            return super().call_soon(callback, *args, **more)

    class Named:
        def __init__(self, name, then=None):
            self.name, self.then = name, then

        def turn(self):
            called.append(self.name)
            if self.then is not None:
                turns.soon(self.then)

    async def step():
        turns.soon(Named("first", then=Named("third")))
        turns.soon(Named("second"))
        for _ in range(3):
            await asyncio.sleep(0)

    turns = Turns()
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(step())
    assert called == ["first", "second", "third"]
    assert scheduled == [[], ["first"]]


class Kept:
    """What an application leaves in the scope of its request."""


def test_an_idle_connection_keeps_nothing_of_its_requests():
    kept = []

    async def app(scope, receive, send):
        scope["kept"] = Kept()
        kept.append(weakref.ref(scope["kept"]))
        if scope["path"] == "/early":  # the response ends before the request does
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
            await send({"type": "http.response.body", "body": b"1 3"})
            return
        await echo(scope, receive, send)

    with listening(app) as address, connected(address) as client:
        for asked, late in (
            (request(body=b"abc"), b""),
            (request(target="/early", body=b"abc")[:-3], b"abc"),
            (request(body=b"abc") * 2, b""),
        ):
            client.sendall(asked)
            answers = b""
            while answers.count(b"\r\n\r\n") < asked.count(b"host: "):
                answers += client.recv(1000)
            client.sendall(late)
            until = time.monotonic() + 60
            while any(each() for each in kept):
                gc.collect()
                assert time.monotonic() < until
                time.sleep(0.01)
    assert len(kept) == 4


class Joins:
    """An application whose head and first part are one write, and which is informed of the disconnect."""

    def __init__(self) -> None:
        self.gone, self.read = threading.Event(), asyncio.Event()
        self.written = []

    async def __call__(self, scope, receive, send):
        parts, self.loop = scope[PARTS], asyncio.get_running_loop()
        await receive()
        parts.watch(self.gone.set)
        write = parts._cycle.transport.write

        async def begin():
            parts._cycle.transport._transport = self
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})

        await parts.join(begin())
        for each in self.written:
            write(each)
        await self.read.wait()
        while not self.gone.is_set():  # a client that has closed is found out by what it is sent
            parts.update()
            if parts.ready:
                parts.write(b"more")
            await asyncio.sleep(0.01)

    def write(self, data):
        self.written.append(data)


def test_the_head_and_the_first_part_are_one_write_and_a_disconnect_is_told():
    app = Joins()
    with listening(app) as address, connected(address) as client:
        client.sendall(request())
        received = b""
        while b"begun" not in received:
            received += client.recv(1000)
        assert received.startswith(b"HTTP/1.1 200")
        assert received.endswith(b"\r\n\r\n5\r\nbegun\r\n")
        assert app.written == [received]
        assert not app.gone.is_set()
        client.close()
        app.loop.call_soon_threadsafe(app.read.set)
        assert app.gone.wait(60)


class Streamed:
    """An application that writes parts while they are ready, and the rest by ASGI messages."""

    def __init__(self, parts: int, size: int) -> None:
        self.left, self.part = parts, b"x" * size
        self.states: list[bool] = []
        self.done = threading.Event()

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        parts = scope[PARTS]
        self.states.append(parts.ready)
        parts.update()
        self.states.append(parts.ready)
        while self.left and parts.ready:
            self.left -= 1
            parts.write(self.part)
            await asyncio.sleep(0)
        self.states.append(parts.ready)
        self.held, self.sent = self.left, parts.sent
        await send({"type": "http.response.body", "body": b"more", "more_body": True})  # waits for the client
        self.states.append(parts.ready)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        parts.update()
        self.states.append(parts.ready)
        self.done.set()


def test_parts_are_not_ready_while_the_client_reads_late():
    app = Streamed(1 << 20, 1 << 14)
    with listening(app) as address, connected(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        until = time.monotonic() + 60
        while len(app.states) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert app.held  # what the sockets hold is little of it
        received = b""
        while part := client.recv(1 << 20):
            received += part
        assert app.done.wait(60)
    assert app.states == [False, True, False, True, False]
    body = received.partition(b"\r\n\r\n")[2]
    assert body.startswith(b"5\r\nbegun\r\n4000\r\nxxx")
    assert body.endswith(b"xxx\r\n4\r\nmore\r\n0\r\n\r\n")
    assert body.count(b"x") == app.sent == ((1 << 20) - app.held) << 14


def test_parts_are_not_ready_for_a_client_that_has_gone():
    states, gone = [], threading.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        scope[PARTS].update()
        states.append(scope[PARTS].ready)
        while (await receive())["type"] != "http.disconnect":
            pass
        states.append(scope[PARTS].ready)
        gone.set()

    with listening(app) as address:
        with connected(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(100)
        assert gone.wait(60)
    assert states == [True, False]
