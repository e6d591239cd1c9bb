"""Shared code of the scripts: the options, targets by their spec, prompts of a folder, a server in its own process."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from headrace.cli.bench.targets import make_target, read_spec
from headrace.config import options
from headrace.lab.bench import report
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import Target
from headrace.lab.plots import plot

READY_SECONDS = 120.0
say = Console(soft_wrap=True, highlight=False).print


def run_part(package: str, *parts: str) -> None:
    """Run the part of a benchmark that the command line names."""
    given = sys.argv[1:]
    if not given or given[0] not in parts:
        raise SystemExit(f"usage: python -m {package} {{{','.join(parts)}}} [options]")
    sys.argv = [f"python -m {package} {given[0]}", *given[1:]]
    importlib.import_module(f"{package}.{given[0]}").main()


def plain_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser without options, whose help is a script's own docstring."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def arguments(about: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options of all scripts; ``defaults`` replace their default values."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="builtin", help="local folder, hub name or builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="JSON; a PNG lies beside it")
    parser.set_defaults(**defaults)
    return parser


def target(spec: str, args: argparse.Namespace, **given: Any) -> Target:
    """A target by its spec, with the script's model."""
    return make_target(read_spec(spec), options({"model": args.model, "device": args.device, **given}))


def publish(
    name: str, args: argparse.Namespace, runs: Sequence[Run], shown: Sequence[Run], **more: Any
) -> None:
    """Prints the table of ``shown`` and writes all ``runs`` and ``more``."""
    path = args.output or Path("bench-results") / f"{name}.json"
    if shown:
        say(report.table(shown, name))
        plot(shown, path.with_suffix(".png"), name)
    report.write(path, report.document(runs, vars(args), more))
    say(f"written: {path}")


def markdown_row(cells: Sequence[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_head(columns: Sequence[str]) -> str:
    """The first two lines of a Markdown table whose first column is text and whose others are numbers."""
    return f"{markdown_row(columns)}\n|---|{'---:|' * (len(columns) - 1)}"


def read_prompts(data: Path) -> list[str]:
    """The first question of each line of ``prompts/*.jsonl``, by file name."""
    texts: list[str] = []
    for path in sorted((data / "prompts").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            given = json.loads(line)
            texts.append(given.get("question") or given.get("prompt") or given["turns"][0])
    return texts


@dataclass(frozen=True, slots=True)
class Server:
    """A process of ``headrace serve`` at a port of the loopback address."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def metrics(self, labels: str = "") -> Mapping[str, float]:
        """Samples of ``/metrics``, summed over labels, by name without the prefix; of those with ``labels`` alone."""
        samples: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False).text.splitlines():
            if line.startswith("headrace:") and labels in line:
                name = line.removeprefix("headrace:").split("{")[0].split(" ")[0]
                samples[name] = samples.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return samples

    def resident_bytes(self) -> int:
        """Memory of the server's process, as Linux counts it."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024


def free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server(args: argparse.Namespace, *flags: str) -> AbstractContextManager[Server]:
    """A server of the script's model; see `serving`."""
    return serving("headrace", args.model, "--device", args.device, *flags)


@contextmanager
def serving(module: str, *words: str, **environment: str) -> Iterator[Server]:
    """A process of ``python -m MODULE serve WORDS`` on a free port; it is ended, and its log shown if it failed."""
    port = free_port()
    command = [sys.executable, "-m", module, "serve", *words, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        try:
            running = Server(port, process.pid)
            _wait_until_ready(running.url, process)
            yield running
        except BaseException:
            log.seek(0)
            say(log.read()[-3000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            if httpx.get(f"{url}/health/ready", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(f"the server was not ready after {READY_SECONDS:.0f} s")
