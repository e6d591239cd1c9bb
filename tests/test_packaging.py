"""What users and their tools find of an installed package: types and completion, also from an editable install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USER_FILE = """
import asyncio
from headrace import LLM, AsyncLLM, CompletionDelta, SamplingParams

def texts() -> list[str]:
    with LLM("builtin", max_num_seqs=8, kv_cache_memory_bytes="1GiB", scheduling_policy="fcfs") as llm:
        for delta in llm.stream("a", SamplingParams(max_tokens=4)):
            shown: CompletionDelta = delta
            print(shown.text)
        return [output.outputs[0].text for output in llm.generate(["a", "b"], n=2)]

async def answer() -> str:
    async with AsyncLLM(max_model_len=1024) as llm:
        async for delta in llm.stream_chat([{"role": "user", "content": "Hello"}]):
            print(delta.text)
        (output,) = await llm.generate("a")
        return output.outputs[0].text

print(texts(), asyncio.run(answer()))
"""

WRONG_FILE = """
from headrace import LLM
LLM("builtin", max_num_seq=8)
LLM("builtin", max_num_seqs="many")
LLM("builtin", dtype="float64")
for output in LLM().generate("a"):
    output.text
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment with an editable install of the package (without its compiled kernels)."""
    folder = tmp_path_factory.mktemp("editable")
    project = folder / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    (project / "headrace").symlink_to(ROOT / "headrace")
    (project / "tests").mkdir()  # as in the checkout, folders beside the package
    wheels = folder / "wheels"
    wheels.mkdir()
    script = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return environment / "bin" / "python"


def clean() -> dict[str, str]:
    """The environment without the checkout's own path."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


def check(python: Path, source: str, folder: Path) -> str:
    """What mypy says of a user's file."""
    (folder / "user.py").write_text(source)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "user.py"]
    done = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_an_editable_install_is_imported(python: Path, tmp_path: Path) -> None:
    script = "import headrace; print(headrace.SamplingParams(max_tokens=3).max_tokens, headrace.__file__)"
    done = subprocess.run(
        [python, "-c", script], cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 ")
    assert not list(python.parents[1].glob("lib/python*/site-packages/__editable___*finder*"))


def test_a_type_checker_accepts_right_options_and_refuses_wrong_ones(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert "Success: no issues found" in check(python, USER_FILE, tmp_path)
    reported = check(python, WRONG_FILE, tmp_path)
    assert 'Unexpected keyword argument "max_num_seq" for "LLM"' in reported
    assert 'Argument "max_num_seqs" to "LLM" has incompatible type "str"; expected "int"' in reported
    assert 'Argument "dtype" to "LLM" has incompatible type' in reported
    assert '"RequestOutput" has no attribute "text"' in reported


def test_one_build_of_the_kernels_serves_every_later_python() -> None:
    """A wheel of it is installed on any Python from 3.11, without a compiler."""
    kernels = pytest.importorskip("headrace.compute.kernels._cpu")
    assert kernels.__file__.endswith(".abi3.so")
