"""The guide to extensions: its files are written as shown, and all of its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.wiring.caches import STORE
from headrace.wiring.engine import ADMISSION, EVICTION, ORDER, VICTIM
from tests.doubles.forks import run_forked
from tests.server.conftest import serving

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "extending.md").read_text()


def code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def snippet(mark: str) -> str:
    (found,) = [each for each in code("python") if mark in each]
    return found


def command(mark: str) -> list[str]:
    """The words of the only command with ``mark``."""
    lines = [line for block in code("bash") for line in block.replace("\\\n", " ").splitlines()]
    (found,) = [line for line in lines if mark in line]
    return shlex.split(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the files of the guide and a short trace."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_policy.py").write_text(snippet("A queue order: short prompts first"))
    (folder / "test_my_policy.py").write_text(snippet("ORDER_CHECKS"))
    (folder / "my_workload.py").write_text(snippet("class Greetings"))
    (folder / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(
            f"2023-11-16 18:15:{i // 2:02}.{5 * (i % 2)},{200 + 900 * (i % 4)},{9 + i}\n" for i in range(60)
        )
    )
    return folder


def run(folder: Path, *words: str) -> str:
    """What a process prints that works in a user's folder."""
    done = run_forked(*words, folder=folder, timeout=240, PYTHONPATH=str(ROOT), COLUMNS="160")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_policy_has_fifteen_lines() -> None:
    assert len(snippet("A queue order: short prompts first").strip().splitlines()) <= 15


def test_its_own_tests_pass(folder: Path) -> None:
    assert "3 passed" in run(folder, "-m", *command("pytest test_my_policy.py"), "-p", "no:cacheprovider")


def test_it_is_simulated_and_compared(folder: Path) -> None:
    reported = run(folder, "-m", *command("headrace simulate"))
    assert "my_policy:ShortPromptsFirst" in reported
    assert re.search(r"requests \(failed\) .*60 \(0\).*60 \(0\)", reported)


def test_it_is_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with serving(*command("headrace serve")[2:]) as server:
        answer = server.post("/v1/completions", {"model": "builtin", "prompt": "Once", "max_tokens": 4})
        assert answer.status_code == 200


def test_it_is_given_to_llm_as_a_class(folder: Path) -> None:
    (folder / "user.py").write_text(snippet("with LLM("))
    assert run(folder, "user.py").strip()


def test_the_workload_is_benchmarked(folder: Path) -> None:
    reported = run(folder, "-m", *command("headrace bench"), "--output", str(folder / "bench.json"))
    assert re.search(r"requests.*8 \(0\)", reported)


def test_a_notebook_gets_rows(folder: Path) -> None:
    (folder / "notebook.py").write_text(snippet("load_trace"))
    lines = run(folder, "notebook.py").splitlines()
    assert [line.rsplit(maxsplit=2)[0] for line in lines] == ["arrival", "short prompts first"]


@pytest.mark.parametrize("port", [ORDER, ADMISSION, VICTIM, EVICTION, STORE], ids=lambda port: port.group)
def test_the_table_has_every_kind_of_plug_in(port) -> None:
    (row,) = [line for line in GUIDE.splitlines() if f"| `{port.flag}` |" in line]
    assert f"`{port.group}`" in row
    methods = [name for name in vars(port.protocol) if not name.startswith("_")]
    assert port is STORE or all(f"`{name}(" in row for name in methods)
