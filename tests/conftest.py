"""Options and fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer.testing
from hypothesis import settings

from tests.doubles.shared_stores import memcached_server, redis_server

# Container images set it. Each worker and each server would compile all modules again: half of the time of collecting.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are first imported, by whichever test that is
os.environ["OMP_WAIT_POLICY"] = (
    "passive"  # workers share cores: a thread that spins takes them from the others
)

os.fsync = lambda descriptor: (
    None
)  # no test cuts the power, and a disk that others write to may take a minute

typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]
"""`CliRunner.invoke` would read the signatures of all commands each time, for as long as most commands take."""

settings.register_profile("short", max_examples=40, deadline=None)  # timing is no property
settings.load_profile("short")
"""`--hypothesis-profile default` runs 100 examples of each test that does not say how many."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out the slow tests, as without a path; see tests/conftest.py",
    )
    parser.addoption(
        "--lives", type=int, default=300, help="random lives of the core to run (a release runs 10000)"
    )
    parser.addoption(
        "--pairs", type=int, default=2000, help="pairs of schema and text to judge (a release judges 100000)"
    )
    parser.addoption(
        "--pauses", type=int, help="seed of pauses of event loops and engines, as on a busy machine"
    )


TESTS = Path(__file__).parent

SLOW = (
    *("server", "oracle", "parity", "real", "deploy", "tools", "training", "scripts", "benchmarks", "judges"),
    *(
        "llm",
        "fleet/dynamo",
        "fleet/kv_transfer/test_exchange.py",
        "fleet/test_equality.py",
        "fleet/test_launched.py",
        "fleet/test_others.py",
        "compute/adopted",
        "compute/kernels/triton",
        "compute/kernels/test_choose.py",
        "compute/kernels/test_cpp.py",
        "compute/kernels/test_fuzz.py",
        "compute/kernels/test_tiles.py",
        "compute/graphs",
        "compute/test_runner_drafts.py",
    ),
    *(
        "compute/encoder/test_sentences.py",
        "core/drafting/test_simulated_loads.py",
        "lab/bench/test_static_batching.py",
    ),
    *(
        "cli/bench/test_calibrate.py",
        "cli/test_quantize.py",
        "cli/test_tune.py",
        "lab/sweep",
        "lab/tune",
        "wiring/test_draft_memory.py",
        "wiring/test_eagle_head.py",
        "wiring/test_quantizing.py",
    ),
    *(
        "wiring/test_semantic_cache.py",
        "wiring/test_mounting.py",
        "response_cache/semantic/test_calibrate.py",
    ),
    *(
        "observe/test_span_exporter.py",
        "observe/test_tracing.py",
        "text/test_processes.py",
        "text/parsing/test_oracle.py",
    ),
    *("docs/test_examples.py", "docs/test_walkthroughs.py", "docs/test_site.py", "docs/test_readme.py"),
    *("docs/test_extending_guide.py", "docs/test_simulator_guide.py", "docs/test_planning_guide.py"),
    "docs/test_memory_guide.py",
    *("test_notebook.py", "test_packaging.py"),
)
"""Folders and files whose tests start servers, load models, compile, or need more than the extra `test`."""

LONGEST = TESTS / "wiring" / "test_front_ends.py"

_SLOW_PATHS = frozenset(TESTS / each for each in SLOW)


def pytest_configure(config: pytest.Config) -> None:
    """`pytest` without a path is the fast set; a path runs all of its tests, so `pytest tests` runs everything.

    A worker of pytest-xdist ignores SIGINT, which the tests of interrupts send, and its children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: starts servers, loads models or compiles")
    config.option.fast = is_fast(config)  # the workers of pytest-xdist get the options, but a path
    if config.option.pauses is not None:
        from tests.doubles.pauses import pause_at_random

        pause_at_random(config.option.pauses)


def is_fast(config: pytest.Config) -> bool:
    """Whether the fast set runs: it was asked for, or there is neither a path nor an expression of marks."""
    without_path = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return bool(config.option.fast or (without_path and not config.option.markexpr))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With ``-n auto``, one worker more than cores for the fast set: many of its tests wait, for timers or children."""
    return len(os.sched_getaffinity(0)) + 1 if is_fast(config) and sys.platform == "linux" else None


@cache
def is_slow(path: Path) -> bool:
    """Whether a file or folder is one of `SLOW`, or in one. It is asked for each test."""
    return not _SLOW_PATHS.isdisjoint((path, *path.parents))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast set does not even import slow files, nor the slow set others without a mark of their own."""
    if is_slow(collection_path):
        return True if config.option.fast else None
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if not is_test or config.option.markexpr != "slow":
        return None
    return None if "mark.slow" in collection_path.read_text() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The fast set leaves out single tests with the mark, too, and begins with its longest file.

    A worker that began it last would be alone with it for six seconds.
    """
    if config.option.fast:
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]
        items.sort(key=lambda item: item.path != LONGEST)


EXTRAS = {"aiohttp", "faiss", "gguf", "msgspec", "pymemcache", "redis", "zmq"}
"""Modules of extras without which a test file is skipped, and not an error."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports what only the extra `dev` installs."""
    report = yield
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr or ""))
    if report.failed and missing and missing[1] in EXTRAS:
        report.outcome = "skipped"
        report.longrepr = (
            str(collector.path),
            0,
            f"Skipped: {missing[1]} is not installed; the extra test has it",
        )
    return report


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of `SLOW`."""
    if is_slow(item.path):
        item.add_marker("slow")


def import_from(worker: int, workers: int) -> None:
    """Import the fast tests, each worker from another file on: what one has compiled, the others read."""
    paths = [path.relative_to(TESTS.parent) for path in sorted(TESTS.rglob("test_*.py")) if not is_slow(path)]
    first = len(paths) * worker // workers
    for path in (*paths[first:], *paths[:first]):
        with suppress(ImportError, pytest.skip.Exception):  # collecting reports both
            import_module(".".join(path.with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without the garbage collector: what is collected stays to the end."""
    gc.disable()
    workers = getattr(session.config, "workerinput", None)
    if workers and session.config.option.fast:
        import_from(int(workers["workerid"].removeprefix("gw")), workers["workercount"])
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep a million objects of pytest's own out of the garbage collector, which stopped tests for seconds.

    Tests make much and keep little, so it looks for garbage a seventh as often as by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000)


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
