"""Kernels run in Triton's interpreter here, on CPU tensors; `tests/conftest.py` chooses it before any is imported."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the extra `dev` installs it on Linux")
