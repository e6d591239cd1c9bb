"""Whether the fast tests find faults that the whole suite finds: each fault of `FAULTS` alone, in a copy of the tree.

A fault is applied, and tests run until one fails: those of the file's mirror and of its folder, all fast ones, the slow
ones. The table says which test found it. Results are kept, so a run can be continued, and with a later ``--until``
only faults that no test has found are tried again:

    python -m tests.judges.seeded_faults --results faults.json --until mirror [--count 5]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import TESTS, is_slow

ROOT = TESTS.parent
FAULTS = Path(__file__).with_suffix(".toml")
MIRROR, *_ = STAGES = ("mirror", "fast", "slow")
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

    def mirrors(self) -> list[list[str]]:
        """The tests that mirror the file, and then those of its folder."""
        inner = Path(self.file).relative_to("headrace")
        folder = TESTS / inner.parent
        own = [folder / f"test_{inner.name}"]
        beside = sorted(folder.glob("test_*.py")) or sorted(TESTS.glob(f"test_{inner.parts[0]}*.py"))
        fast = [[path for path in paths if path.exists() and not is_slow(path)] for paths in (own, beside)]
        return [[str(path.relative_to(ROOT)) for path in paths] for paths in fast if paths]


def read_faults() -> list[Fault]:
    """All faults, in the order of their file."""
    return [Fault(**each) for each in tomllib.loads(FAULTS.read_text())["fault"]]


def _copy_tree(folder: Path) -> None:
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


def _judge(fault: Fault, folder: Path, stages: Sequence[str], workers: str) -> dict[str, str]:
    """Which tests of ``stages`` find the fault."""
    runs = {
        MIRROR: [["--fast", *paths] for paths in fault.mirrors()],
        "fast": [["--fast", "-n", workers, "tests"]],
        "slow": [["-m", "slow", "-n", workers, "tests"]],
    }
    original = (folder / fault.file).read_text()
    fault.apply(folder)
    try:
        for stage in stages:
            for arguments in runs[stage]:
                if test := _failed(folder, arguments):
                    return {"found by": stage, "test": test}
    finally:
        (folder / fault.file).write_text(original)
    return {"passed": stages[-1], "test": ""}


def _table(results: dict[str, Any]) -> Iterator[str]:
    yield "| fault | found by | test |"
    yield "|---|---|---|"
    for name, result in results.items():
        yield f"| {name} | {result.get('found by', 'none')} | `{result['test']}` |"


def main() -> None:
    """Judge the faults whose results say too little, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--copy", type=Path, default=Path("/tmp/seeded_faults"), help="folder to work in")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1])
    parser.add_argument("--count", type=int, default=1000, help="faults of this run at most")
    parser.add_argument("--workers", default="2", help="processes of tests")
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(given.results.read_text()) if given.results.exists() else {}
    wanted = STAGES[: STAGES.index(given.until) + 1]
    _copy_tree(given.copy)
    for fault in read_faults():
        known = results.get(fault.name, {})
        passed = STAGES.index(known["passed"]) + 1 if "passed" in known else 0
        if "found by" in known or not wanted[passed:] or not given.count:
            continue
        given.count -= 1
        results[fault.name] = _judge(fault, given.copy, wanted[passed:], given.workers)
        print(fault.name, results[fault.name], flush=True)
        given.results.write_text(json.dumps(results, indent=2))
    print("\n".join(_table(results)))


if __name__ == "__main__":
    main()
