"""The kernels on tiles (AMX) where no processor has them: compiled with plain arithmetic in place of its instructions.

It replaces what `csrc/tile_instructions.h` has and nothing else, so whatever decides which rows, words and shapes
meet is tested here as on the machine itself; how fast it is cannot be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCES = ROOT / "headrace/compute/kernels/csrc"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-pthread", "-fno-math-errno", "-w"]
TESTS = ("test_cpp.py", "test_edges.py", "test_stack.py")
COMPILER = shutil.which("g++") or shutil.which("clang++")

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


def compiled(folder: Path) -> Path:
    """The extension with emulated tiles."""
    flags = [*FLAGS, f'-DHEADRACE_TILE_INSTRUCTIONS="{HERE / "emulated_tiles.h"}"']
    include = f"-I{sysconfig.get_paths()['include']}"
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, to: Path) -> None:
        subprocess.run([str(COMPILER), *flags, include, "-c", str(source), "-o", str(to)], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    made = folder / "_cpu.so"
    subprocess.run([str(COMPILER), "-shared", "-pthread", *map(str, objects), "-o", str(made)], check=True)
    return made


@pytest.mark.skipif("amx" in LEVELS, reason="this machine has tiles of its own")
@pytest.mark.skipif(
    "avx512_bf16" not in LEVELS, reason="what lies beside the tiles needs AVX-512 with bfloat16"
)
@pytest.mark.skipif(COMPILER is None, reason="there is no compiler")
@pytest.mark.timeout(900)
def test_kernels_on_tiles_hold_where_tiles_are_emulated(tmp_path: Path) -> None:
    environment = os.environ | {"HEADRACE_EMULATED": str(compiled(tmp_path))}
    which = [str(HERE / name) for name in TESTS]
    plugin = ["-p", "tests.compute.kernels.emulated", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", *plugin, "-k", "amx and not openmp", *which],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]  # 5 where there was nothing to run
