"""Kernels share their work between three threads here, however many there are: all of it must be right so too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.compute.kernels import KernelsUnavailable, cpp


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpp, "limit_threads", lambda: 3)
    yield
    monkeypatch.undo()
    try:
        cpp.CppKernels()
    except KernelsUnavailable:
        return
