"""Options and fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

from tests.doubles.shared_stores import memcached_server, redis_server

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are first imported, by whichever test that is


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lives", type=int, default=1000, help="random lives of the core to run (a release runs 10000)"
    )
    parser.addoption(
        "--pairs", type=int, default=6000, help="pairs of schema and text to judge (a release judges 100000)"
    )


def pytest_configure() -> None:
    """A worker of pytest-xdist ignores SIGINT, which the tests of interrupts send, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep a million objects of pytest's own out of the garbage collector, which stopped tests for seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The server runs on asyncio; anyio would also try trio, which other packages bring along."""
    return "asyncio"


@pytest.fixture(scope="module")
def redis_port() -> Iterator[int]:
    """Where a Redis listens that a module's tests share."""
    with redis_server() as server:
        yield server.port


@pytest.fixture(scope="module")
def memcached_port() -> Iterator[int]:
    """Where a memcached listens that a module's tests share."""
    with memcached_server() as server:
        yield server.port
