"""What tests of commands share."""

from __future__ import annotations

import pytest


@pytest.fixture
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is measured with little memory and small products: with its own amounts it takes two seconds."""
    from headrace.compute.kernels import measure

    monkeypatch.setattr(measure, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "_ROWS", 8)
