"""Commands whose plots are not drawn, which would take ten times as long as the commands themselves."""

from __future__ import annotations

import pytest


@pytest.fixture
def drawn() -> None:
    """For a test that looks at a plot."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        for module in ("headrace.lab.plots", "headrace.lab.sweep"):
            monkeypatch.setattr(f"{module}.plot", lambda *args: None)
