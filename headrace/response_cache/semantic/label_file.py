"""The SQLite file of labels: for each labelled pair its tenant, score and label, and no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.files import Layout, open_database, private_folder
from headrace.response_cache.rules.calibration import LabelledDecision
from headrace.response_cache.rules.pairs import SeenPair

_TABLES = """
CREATE TABLE labels (
    pair TEXT NOT NULL, basis TEXT NOT NULL, tenant TEXT NOT NULL, entries INTEGER NOT NULL, score REAL NOT NULL,
    least REAL NOT NULL, same INTEGER NOT NULL, PRIMARY KEY (basis, pair)
);
CREATE TABLE tests (basis TEXT NOT NULL, tenant TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (basis, tenant));
"""
LAYOUT = Layout("a file of labels", "labels", (_TABLES,))


class TenantLabels:
    """The labelled decisions of a tenant, and how often they were tested."""

    def __init__(self, tests: int) -> None:
        self.tests = tests
        self.decisions: list[LabelledDecision] = []


class LabelFile:
    """The labels of pairs with one ``basis``; those with others stay in the file and do not count.

    Raises:
        OSError: the file cannot be used.
    """

    def __init__(self, path: Path, basis: str) -> None:
        private_folder(path.parent)
        self._connection = open_database(path, LAYOUT, isolation_level="DEFERRED")
        self._basis = basis

    def add(self, labelled: Sequence[tuple[SeenPair, bool]]) -> None:
        """Add or replace labels, and count a test for each of their tenants; all or none."""
        rows = [
            (pair.id, self._basis, pair.tenant, pair.entries, pair.score, pair.least, same)
            for pair, same in labelled
        ]
        tenants = sorted({pair.tenant for pair, _ in labelled})
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO labels VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._connection.executemany(
                "INSERT INTO tests VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET number = number + 1",
                [(self._basis, tenant) for tenant in tenants],
            )

    def tenants(self) -> dict[str, TenantLabels]:
        """The labels by tenant."""
        tests = self._connection.execute("SELECT tenant, number FROM tests WHERE basis = ?", (self._basis,))
        found = {tenant: TenantLabels(number) for tenant, number in tests}
        labels = "SELECT tenant, entries, score, least, same FROM labels WHERE basis = ?"
        for tenant, entries, score, least, same in self._connection.execute(labels, (self._basis,)):
            found[tenant].decisions.append(LabelledDecision(entries, score, least, bool(same)))
        return found

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
