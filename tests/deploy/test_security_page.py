"""SECURITY.md names a test for each promise, and the tests exist."""

from __future__ import annotations

import re

from tests.deploy.files import ROOT


def promises() -> dict[str, list[str]]:
    """Each promise of the tables, with the paths of its tests."""
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = page.partition("## Guarantees, and how they are tested")[2].partition("\n## ")[0]
    rows = [line.strip("|").rpartition("|") for line in section.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip() != "guarantee"]
    return {promise.strip(): re.findall(r"`((?:[\w/]+/)?test_\w+\.py)`", tests) for promise, _, tests in rows}


def test_every_promise_has_tests_that_exist() -> None:
    found = promises()
    assert len(found) > 20
    missing = {
        promise: tests
        for promise, tests in found.items()
        if not tests or not all((ROOT / "tests" / test).is_file() for test in tests)
    }
    assert missing == {}
