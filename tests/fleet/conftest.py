"""A tiny model for the ranks of a file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.families import CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    CASES["llama"].build(folder)
    return folder
