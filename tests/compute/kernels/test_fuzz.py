"""No argument of a kernel ends the process: wrong ones are refused by an exception."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

ROUNDS = 600


def refused(what: str, level: str, seed: int = 0) -> int:
    program = [sys.executable, "-X", "faulthandler", "-m", "tests.compute.kernels.fuzzed"]
    ended = subprocess.run(
        [*program, what, level, str(seed), str(ROUNDS)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return int(ended.stdout)


def test_every_function_of_the_extension_refuses_what_is_wrong() -> None:
    assert refused("entries", LEVELS[0]) > 1000


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[-1]])
def test_every_method_refuses_what_does_not_fit(level: str) -> None:
    assert refused("wrappers", level) > ROUNDS // 2
