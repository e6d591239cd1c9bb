"""Kernels run in Triton's interpreter here, on CPU tensors; it must be chosen before a kernel is imported."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the extra `test` installs it on Linux")
