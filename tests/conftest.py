"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lives", type=int, default=1500, help="random lives of the core to run (a release runs 10000)"
    )
