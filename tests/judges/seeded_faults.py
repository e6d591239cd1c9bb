"""Whether the fast tests find faults that the whole suite finds: each fault of `FAULTS` alone, in a clone of the tree.

A fault is applied, and tests run until some of them fail: the fast tests that mirror the file, all fast tests, the
slow ones. The table says which test found it. Faults run in the order of the file; those in the results already are
left out, so a run can be continued:

    python -m tests.judges.seeded_faults --results faults.json [--clone /tmp/faults] [--name "..."] [--slow]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import TESTS

ROOT = TESTS.parent
FAULTS = Path(__file__).with_suffix(".toml")
SECONDS = 3600
"""A fault that makes the tests run longer than this counts as found: it hangs."""


class Fault(NamedTuple):
    """``old`` stands once in ``file``; ``new`` is the fault."""

    name: str
    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Write the fault into the tree at ``root``; ValueError if its text does not stand there once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times the text of {self.name!r}")
        path.write_text(text.replace(self.old, self.new))

    def mirrors(self) -> list[str]:
        """Paths of the tests that mirror the file: its own file, then its folder."""
        inner = Path(self.file).relative_to("headrace")
        own = TESTS / inner.parent / f"test_{inner.name}"
        found = [path for path in (own, TESTS / inner.parent) if path.exists()]
        return [str(path.relative_to(ROOT)) for path in found]


def read_faults() -> list[Fault]:
    """All faults, in the order of their file."""
    return [Fault(**each) for each in tomllib.loads(FAULTS.read_text())["fault"]]


def _clone(folder: Path) -> None:
    """The tracked files of this tree as they are, and its compiled kernels, in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    kernels = [str(each.relative_to(ROOT)) for each in (ROOT / "headrace/compute/kernels").glob("*.so")]
    for name in [*filter(None, listed.decode().split("\0")), *kernels]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _failed(folder: Path, arguments: Sequence[str]) -> str:
    """The first test that failed, or nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=SECONDS, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode in (0, 5):  # 5: no test was selected
        return ""
    if done.returncode > 2:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else done.stdout.strip().rpartition("\n")[2][:200] or "an exit"


def _judge(fault: Fault, folder: Path, workers: str, slow: bool) -> dict[str, Any]:
    """Which tests find the fault."""
    original = (folder / fault.file).read_text()
    stages = [("mirror", ["--fast", path]) for path in fault.mirrors()]
    stages.append(("fast", ["--fast", "-n", workers, "tests"]))
    if slow:
        stages.append(("slow", ["-m", "slow", "-n", workers, "tests"]))
    began = time.monotonic()
    fault.apply(folder)
    try:
        for stage, arguments in stages:
            if test := _failed(folder, arguments):
                return {"by": stage, "test": test, "seconds": round(time.monotonic() - began)}
    finally:
        (folder / fault.file).write_text(original)
    return {"by": "none", "test": "", "seconds": round(time.monotonic() - began)}


def _table(results: dict[str, Any]) -> Iterator[str]:
    yield "| fault | found by | test |"
    yield "|---|---|---|"
    for name, result in results.items():
        yield f"| {name} | {result['by']} | `{result['test']}` |"


def main() -> None:
    """Judge the faults that are not in the results yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--clone", type=Path, default=Path("/tmp/seeded_faults"))
    parser.add_argument("--name", help="only this fault")
    parser.add_argument("--workers", default="2")
    parser.add_argument(
        "--slow", action="store_true", help="run the slow tests for what passes the fast ones"
    )
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(given.results.read_text()) if given.results.exists() else {}
    _clone(given.clone)
    if not results and (test := _failed(given.clone, ["--fast", "-n", given.workers, "tests"])):
        raise SystemExit(f"without a fault, {test} fails")
    for fault in read_faults():
        if given.name in (None, fault.name) and fault.name not in results:
            results[fault.name] = _judge(fault, given.clone, given.workers, given.slow)
            print(fault.name, results[fault.name], flush=True)
            given.results.write_text(json.dumps(results, indent=2))
    print("\n".join(_table(results)))


if __name__ == "__main__":
    main()
