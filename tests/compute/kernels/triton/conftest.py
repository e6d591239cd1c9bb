"""Kernels run in Triton's interpreter here, on CPU tensors; `tests/conftest.py` chooses it before any is imported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra `dev` installs it on Linux")


@pytest.fixture
def same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are the same wherever a row stands in its tile.

    They are numpy's, whose order of sums depends on that on some CPUs, so they are summed in float64 here.
    """
    matmul = np.matmul

    def summed(a: Any, b: Any, dtype: Any = None) -> Any:
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype or a.dtype)

    monkeypatch.setattr(np, "matmul", summed)
