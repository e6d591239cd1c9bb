import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.batch import run_batch
from headrace.config import ConfigError, Options
from tests.cli.fake_server import FakeServer, running

app = typer.Typer()
app.command()(run_batch)
COMMAND = "import typer; from headrace.cli.batch import run_batch; typer.run(run_batch)"


def write_input(path: Path, count: int) -> Path:
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "echo", "prompt": f"r{number}"},
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_results(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines)
    return results


def test_a_batch_runs_and_is_summed_up(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 5)
    with running() as server:
        flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", server.url]
        result = CliRunner().invoke(app, flags)
        again = CliRunner().invoke(app, flags)
        assert len(server.bodies) == 5
    assert result.exit_code == 0
    assert "5 of 5 lines done: 5 succeeded, 0 failed, 0 done before" in result.stdout
    assert "5 prompt and 15 output tokens" in result.stdout
    assert again.exit_code == 0
    assert "5 of 5 lines done: 0 succeeded, 0 failed, 5 done before" in again.stdout
    results = read_results(tmp_path / "out")
    assert results["r3"]["response"]["body"]["choices"][0]["text"] == "you said: r3"


def test_failed_lines_show_in_the_exit_code(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 2)
    with (tmp_path / "in").open("a") as file:
        file.write('{"custom_id": "bad"}\n')
    with running() as server:
        flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", server.url]
        assert CliRunner().invoke(app, flags).exit_code == 1
        assert CliRunner().invoke(app, flags).exit_code == 1  # the failure is in the file
    assert read_results(tmp_path / "out")["bad"]["error"]["code"] == "invalid_line"


def test_duplicate_ids_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"custom_id": "a"}\n{"custom_id": "a"}\n')
    result = CliRunner().invoke(app, ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError)
    assert "'a' is in line 1 and in line 2" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [["--url", "http://[bad"], ["--url", "localhost:8000"], ["--url", "http://x", "--api-key", "a\nb"]],
)
def test_what_is_no_address_or_key_is_one_line(tmp_path: Path, flags: list[str]) -> None:
    write_input(tmp_path / "in", 2)
    result = CliRunner().invoke(app, ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *flags])
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "out").exists()


def test_a_missing_server_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.batch.work.FIRST_WAIT_SECONDS", 0.0)
    write_input(tmp_path / "in", 2)
    flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", "http://127.0.0.1:9"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 130
    assert "Run the same command again to continue" in result.stderr
    assert (tmp_path / "out").read_bytes() == b""


def test_without_a_url_the_lines_run_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, running_now, models = FakeServer(), [], []

    @asynccontextmanager
    async def engine() -> AsyncIterator[None]:
        running_now.append("started")
        yield
        running_now.append("stopped")

    def build_app(options: Options) -> tuple[Any, Any]:
        models.append(options.model.model)
        assert (options.server.api_key, options.server.api_key_file) == ((), None)
        return fake.app, engine()

    monkeypatch.setitem(sys.modules, "headrace.wiring.server", SimpleNamespace(build_app=build_app))
    write_input(tmp_path / "in", 3)
    servers_own = tmp_path / "serve.yaml"
    servers_own.write_text("api-key: [secret]\napi-key-file: keys.txt\n")
    flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "mine"]
    result = CliRunner().invoke(app, [*flags, "--config", str(servers_own)])
    assert result.exit_code == 0, result.output
    assert running_now == ["started", "stopped"]
    assert models == ["mine"]
    assert {body["model"] for body in fake.bodies} == {"mine"}
    assert read_results(tmp_path / "out").keys() == {"r0", "r1", "r2"}


def start(tmp_path: Path, url: str, output_bytes: int = resource.RLIM_INFINITY) -> subprocess.Popen[bytes]:
    flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", url, "--max-concurrency", "5"]

    def prepare() -> None:
        # What runs the tests may be a background job, whose children are born deaf to an interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, resource.RLIM_INFINITY))

    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while True:
        ended = process.poll()
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert ended is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.002)


def test_killed_at_any_moment_it_neither_loses_nor_repeats_a_line(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 60)
    recorded: set[str] = set()
    with running(delay=0.02) as server:
        for lines in (1, 30):
            process = start(tmp_path, server.url)
            wait_for_lines(tmp_path / "out", lines, process)
            process.kill()
            process.communicate()
            sent = {body["prompt"] for body in server.bodies}
            assert not sent & recorded  # what had its result was not sent again
            server.bodies.clear()
            whole = (tmp_path / "out").read_bytes().rpartition(b"\n")[0]
            recorded = {json.loads(line)["custom_id"] for line in whole.splitlines()}
            with (tmp_path / "out").open("ab") as file:
                file.write(b'{"id": "batch_req_1", "cust')  # a line that the kill tore
        process = start(tmp_path, server.url)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert not {body["prompt"] for body in server.bodies} & recorded
    results = read_results(tmp_path / "out")
    assert results.keys() == {f"r{number}" for number in range(60)}
    for name, result in results.items():
        assert result["response"]["body"]["choices"][0]["text"] == f"you said: {name}"
    assert b"60 of 60 lines done" in out


def test_ctrl_c_stops_the_run_in_order(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 500)
    with running(delay=0.05) as server:
        process = start(tmp_path, server.url)
        wait_for_lines(tmp_path / "out", 3, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"of 500 lines done" in out
    assert b"Traceback" not in err


def test_a_full_disk_stops_the_run_and_the_next_goes_on(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 20)
    with running() as server:
        process = start(tmp_path, server.url, output_bytes=2000)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert b"of 20 lines done" in out
        assert b"Traceback" not in err
        assert f"{tmp_path / 'out'} cannot be written: File too large".encode() in err
        process = start(tmp_path, server.url)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert read_results(tmp_path / "out").keys() == {f"r{number}" for number in range(20)}
