"""Every kernel compiles for every GPU that it is meant for, within the sizes that the documentation records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.timeout(900)
def test_kernels_compile_and_none_is_worse_than_recorded(tmp_path: Path) -> None:
    """In a process of its own, because kernels that were imported for the interpreter cannot be compiled."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "scripts/kernel_gate.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
