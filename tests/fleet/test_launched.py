"""Ranks that a launcher started meet rank 0 over TCP; each mistake of the launch is one line before anything loads."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
from torch._C._distributed_c10d import TCPStore

from headrace.config import ConfigError, Launch, options, read_launch
from headrace.fleet import launched
from headrace.fleet.launched import Launched, SecretDiffers, meeting_point, prove, read_line, run_rank
from headrace.fleet.messages import versions
from headrace.fleet.others import RankFailed
from headrace.wiring import model, server
from headrace.wiring.loading import ranks
from tests.doubles.shared_stores import free_port
from tests.fleet.runs import answers, answers_of, load


def launch(port: int, rank: int = 0, size: int = 2, *, agent_store: bool = False, secret: str = "") -> Launch:
    return Launch(rank, size, "127.0.0.1", port, 0, 1, agent_store, "0", secret)


def suppressed(call: Callable[[], object]) -> None:
    with suppress(RankFailed, OSError):
        call()


def environment(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@contextmanager
def running(rank: Callable[[], None]) -> Iterator[list[Exception]]:
    """Run a rank as a thread; yields what it raised, and waits for its end."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            rank()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield raised
    thread.join(60)
    assert not thread.is_alive()


class Hello:
    """A connection that says what a rank would."""

    def __init__(self, port: int, secret: str = "", **words: object) -> None:
        hello = {"rank": 1, "size": 2, "versions": versions()} | words
        self.socket = socket.create_connection(("127.0.0.1", port), 60)
        if secret:
            prove(self.socket, secret, time.monotonic() + 60)
        self.socket.sendall(json.dumps(hello).encode() + b"\n")

    def answer(self) -> str:
        with self.socket, self.socket.makefile() as lines:
            return lines.readline()


@contextmanager
def listen(size: int = 2, secret: str = "") -> Iterator[Launched]:
    """Rank 0's side of so many ranks, on a free port."""
    others = Launched(launch(free_port(), size=size, secret=secret))
    yield others
    others.close()


@pytest.fixture
def listening() -> Iterator[Launched]:
    with listen() as others:
        yield others


def test_two_launched_ranks_give_the_tokens_of_one_process_and_survive_a_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answers_of(folder)
    store, started = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []

    def start(descriptor: int, own: str) -> subprocess.Popen[bytes]:
        started.append(launched_rank_start(descriptor, own))
        return started[-1]

    launched_rank_start = launched.start_process
    monkeypatch.setattr(launched, "start_process", start)
    with running(lambda: run_rank(launch(store.port, 1, agent_store=True), folder)) as raised:
        environment(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port)
        environment(monkeypatch, TORCHELASTIC_USE_AGENT_STORE=True)
        loaded = load(folder, 1, 2, overlap=1)
        try:
            assert answers(loaded) == whole
            started[0].send_signal(signal.SIGKILL)
            started[0].wait()
            assert answers(loaded) == whole, "what met the loss was computed again"
            loaded.engine.check_consistency()
            assert answers(loaded) == whole
            assert len(started) == 2
        finally:
            model.close(loaded)
    assert not raised
    assert started[1].poll() is not None


def test_torchruns_own_store_says_where_rank_0_listens() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = Launched(launch(store.port, agent_store=True))
    try:
        host, port = meeting_point(launch(store.port, 1, agent_store=True))
        assert port != store.port
        with socket.create_connection((host, port), 60):
            pass
    finally:
        others.close()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "JOIN_SECONDS", 1.0)
    with listen(4) as others:
        waiting = Hello(others._port, rank=2, size=4)
        with pytest.raises(RankFailed, match=r"^rank 1, 3 did not connect to 127.0.0.1, port \d+, within"):
            others.start()
        waiting.socket.close()


WRONG = [
    ({"versions": "Headrace 0"}, "rank 1 at 127.0.0.1 has Headrace 0; rank 0 has Headrace "),
    ({"size": 3}, "rank 1 at 127.0.0.1 is one of 3 ranks; rank 0 is one of 2"),
    ({"rank": 2}, "rank 2 at 127.0.0.1 is one of 2 ranks; rank 0 is one of 2"),
]


@pytest.mark.parametrize(("words", "problem"), WRONG)
def test_a_rank_of_another_group_is_refused_on_both_sides(words: dict[str, object], problem: str) -> None:
    with listen(secret="s") as others:
        with ThreadPoolExecutor() as pool:
            other = pool.submit(Hello, others._port, "s", **words)
            with pytest.raises(RankFailed, match=f"^{problem}"):
                others.start()
        assert other.result().answer().startswith(problem)


@pytest.mark.parametrize(("words", "problem"), WRONG)
def test_a_line_without_a_secret_never_ends_a_start(
    words: dict[str, object], problem: str, listening: Launched, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor() as pool:
        peers = pool.submit(listening.open_peers)
        assert Hello(listening._port, **words).answer().startswith(problem)
        right = Hello(listening._port)  # not before: greeted first, it would end the wait for the other
        (peer,) = peers.result()
    assert right.answer() == "\n"
    assert problem in caplog.text
    peer.close()


def test_a_rank_twice_is_refused() -> None:
    with listen(3, secret="s") as others:
        with ThreadPoolExecutor() as pool:
            twins = [pool.submit(Hello, others._port, secret="s", rank=1, size=3) for _ in range(2)]
            with pytest.raises(RankFailed, match="another process has the same rank"):
                others.start()
        assert sum("the same rank" in each.result().answer() for each in twins) == 1


def test_the_secret_is_verified_on_both_sides() -> None:
    with listen(secret="right") as others:
        with running(lambda: run_rank(launch(others._port, 1, secret="wrong"), Path())) as raised:
            wrong = Thread(target=lambda: suppressed(others.open_peers))
            wrong.start()
        assert str(raised[0]) == "its secret is not that of rank 0 (--rank-secret)"
        with running(lambda: run_rank(launch(others._port, 1), Path())) as raised:
            pass
        assert str(raised[0]).startswith("rank 0 rejected this rank: the secret of --rank-secret is needed")
        right = Hello(others._port, secret="right")
        wrong.join(60)
        assert right.answer() == "\n"
    rank_0, rank = socket.socketpair()
    with rank_0, rank, running(lambda: prove(rank, "right", time.monotonic() + 5)) as raised:
        read_line(rank_0, time.monotonic() + 5)
        rank_0.sendall(b"nonce\n")
        read_line(rank_0, time.monotonic() + 5)
        rank_0.sendall(b"0" * 64 + b"\n")
    assert isinstance(raised[0], SecretDiffers)


def test_silent_and_slow_strangers_hold_up_no_rank(listening: Launched) -> None:
    strangers = [socket.create_connection(("127.0.0.1", listening._port), 60) for _ in range(8)]
    strangers[0].sendall(b"x" * 3000)  # a line that does not end
    rank = Hello(listening._port)
    began = time.monotonic()
    (peer,) = listening.open_peers()
    assert time.monotonic() - began < launched.HELLO_SECONDS
    assert rank.answer() == "\n"
    peer.close()
    for each in strangers:
        each.close()


@pytest.mark.parametrize(
    "line",
    [
        *(b"\x00\xff\n", b"null\n", b"{}\n", b"[" * 4000 + b"\n", b'{"rank": 1e400}\n', b"x" * 5000 + b"\n"),
        *(
            b'{"rank": "1", "size": {}, "versions": 1}\n',
            b'{"rank": 1, "size": 2, "versions": "\\ud800"}\n',
            b"\n",
        ),
        *(b'{"rank": ' + b"9" * 4000 + b', "size": 2, "versions": "x"}\n', b'{"rank": NaN}\n', b"NaN\n"),
    ],
)
def test_any_first_line_is_survived(listening: Launched, line: bytes) -> None:
    stranger = socket.create_connection(("127.0.0.1", listening._port), 60)
    stranger.sendall(line)
    rank = Hello(listening._port)
    (peer,) = listening.open_peers()
    peer.close()
    stranger.close()
    assert rank.answer() == "\n"


def test_other_machines_need_a_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="192.0.2.1", MASTER_PORT=29500)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 192\.0\.2\.1: .* set HEADRACE_RANK_SECRET"):
        load(folder, 2)
    environment(monkeypatch, RANK=1)
    with pytest.raises(ConfigError, match="HEADRACE_RANK_SECRET"):
        ranks.launched_rank(options({"tensor_parallel_size": 2}).model)
    run = ranks.launched_rank(options({"tensor_parallel_size": 2, "rank_secret": "s"}).model)
    assert run is not None
    assert "'s'" not in repr(launch(1, secret="s"))


def test_a_connection_that_is_no_rank_is_ignored(
    listening: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "HELLO_SECONDS", 0.2)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b""):
        stranger = socket.create_connection(("127.0.0.1", listening._port), 60)
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
    rank = Hello(listening._port)
    (peer,) = listening.open_peers()
    assert peer.rank == 1
    peer.close()
    assert rank.answer() == "\n"


def test_a_refused_rank_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_side() -> str:
        return versions() if threading.current_thread() is threading.main_thread() else "Headrace 0"

    monkeypatch.setattr(launched, "versions", on_each_side)
    with (
        listen(secret="s") as others,
        running(lambda: run_rank(launch(others._port, 1, secret="s"), Path())) as raised,
        pytest.raises(RankFailed),
    ):
        others.start()
    assert str(raised[0]).startswith(
        "rank 0 rejected this rank: rank 1 at 127.0.0.1 has Headrace 0; rank 0 has"
    )


def test_rank_0_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "JOIN_SECONDS", 0.1)
    with socket.socket() as silent:  # bound and not listening
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(
            RankFailed, match=rf"rank 0 cannot be reached at 127.0.0.1, port {port}: connection refused"
        ):
            run_rank(launch(port, 1), Path())


def test_a_port_in_use_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environment(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(ConfigError, match=rf"MASTER_ADDR 127.0.0.1, port {port}: address already in use"):
            load(folder, 2)


def test_the_number_of_ranks_must_be_that_of_the_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, RANK=1, WORLD_SIZE=4, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE 4: --tensor-parallel-size 2 times .* 1 are 2 ranks"):
        load(folder, 2)


def test_only_a_server_can_be_another_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(ConfigError, match=r"^RANK 1: ranks other than 0 run `headrace serve`"):
        load(folder, 2)
    joined: list[tuple[int, Path]] = []
    monkeypatch.setattr(ranks, "run_rank", lambda launch, folder: joined.append((launch.rank, folder)))
    handler = signal.getsignal(signal.SIGINT)
    try:
        server.serve(options({"model": str(folder), "tensor_parallel_size": 2}), began=0.0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert joined == [(1, folder)]


def test_a_single_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_launch() is None
    environment(monkeypatch, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    assert read_launch() is None


GIVEN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, **GIVEN)
    assert read_launch() == Launch(1, 4, "10.0.0.1", 29500, 0, 1, False, "0")
    environment(monkeypatch, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    environment(monkeypatch, TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=3)
    assert read_launch() == Launch(1, 4, "10.0.0.1", 29500, 1, 2, True, "3")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MASTER_ADDR": ""}, "RANK is set, but MASTER_ADDR is not"),
        ({"RANK": ""}, "WORLD_SIZE is set, but RANK is not"),
        ({"RANK": "4"}, "RANK '4': expected a number from 0 to 3"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE 'two': expected a number from 1 to 65536"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT '0': expected a number from 1 to 65535"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK '1': expected a number from 0 to 0"),
    ],
)
def test_variables_without_sense_are_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, **GIVEN | variables)
    with pytest.raises(ConfigError, match=f"^the environment: {message}"):
        read_launch()
