from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]
README = (FOLDER / "README.md").read_text()


def section(title: str) -> str:
    """The text below a heading."""
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_is_in_the_table_with_its_real_flags_and_files(path):
    source, named = path.read_text(), f"`{path.stem}`"
    assert f"| `python -m benchmarks.{path.stem}" in README
    takes = re.search(r"from benchmarks\.stage import .*\barguments\b", source)
    assert (named in section("Common options")) == bool(takes)
    writes = any(call in source for call in ("publish(", "report.write("))
    assert (named in section("Output files")) == writes
