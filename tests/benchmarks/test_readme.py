from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [
    *(path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()),
    *sorted(FOLDER.glob("*/__main__.py")),
]
README = (FOLDER / "README.md").read_text()
PARTS = [
    (path.parent.name, part)
    for path in SCRIPTS
    for given in re.findall(r"run_part\(\"[\w.]+\", (.*)\)", path.read_text())
    for part in re.findall(r"\w+", given)
]


def test_the_table_has_every_script():
    names = [path.parent.name if path.stem == "__main__" else path.stem for path in SCRIPTS]
    assert sorted(re.findall(r"^\| `python -m benchmarks\.(\w+)`", README, re.MULTILINE)) == sorted(names)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_part_is_below_its_script_and_can_be_asked_for_its_options(name, part, monkeypatch, capsys):
    rows = README.partition(f"| `python -m benchmarks.{name}` |")[2].partition("| `python -m")[0]
    assert re.search(rf" `{part}\b", rows)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}.{part}").main()
    shown = capsys.readouterr().out
    assert "--help" in shown
