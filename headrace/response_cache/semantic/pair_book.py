"""The pairs that the semantic cache took for the same, their labels, and the rules that these certify for each tenant.

The search thread records pairs and asks for the judge of a tenant. The event loop exports, and imports in another
thread. A lock guards the pairs, and another one imports; the rules of tenants are replaced as a whole. The file of
labels has the tenant, score and label of each labelled pair, and no text.
"""

from __future__ import annotations

import hashlib
import math
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.files import Layout, open_database, private_folder
from headrace.response_cache.rules.calibration import (
    CONFIDENCE,
    Calibration,
    Certificate,
    LabelledDecision,
    Standing,
    Tally,
    TenantRule,
    count,
    doubt_of_test,
    tenant_rules,
    upper_error,
)
from headrace.response_cache.rules.guards import Veto, compare, traits, veto
from headrace.response_cache.rules.judge import (
    Curve,
    Decline,
    Doubt,
    Judge,
    Neighbour,
    PairScorer,
    Rule,
    Score,
    Serve,
)
from headrace.response_cache.rules.pairs import ByTenant, SeenPair, pair_id

MOST_PAIRS = 10_000
"""Pairs remembered, some hundred bytes each; the tenant with the most loses its oldest first."""

NEAR = 0.7
"""From this cosine on, a pair is recorded that a guard keeps apart."""

BY_HAND = "by_hand"
BY_COSINE = Score(0.0, (("cosine", Curve((-1.0, 1.0), (-1.0, 1.0))),))
"""The score that is the cosine."""


class Basis(NamedTuple):
    """What decides: a calibration at an error bound, or a cosine by hand, with a calibration or without.

    ``second`` is the second judge.
    """

    encoder: str
    calibration: Calibration | None
    cosine: float | None
    max_error: float
    second: PairScorer | None = None

    @property
    def name(self) -> str:
        """Names what scores are made with: labels of pairs hold for one basis."""
        if self.cosine is not None or self.calibration is None:
            return f"cosine of {self.encoder}"
        return hashlib.sha256(self.calibration.to_text().encode()).hexdigest()[:32]

    def rules(self) -> list[Rule]:
        """The rules of tenants without labels of their own.

        Raises:
            Unsupported: the calibration does not certify the error bound.
        """
        calibration, cosine = self.calibration, self.cosine
        if cosine is None:
            assert calibration is not None
            return calibration.rules(self.max_error, CONFIDENCE)
        if calibration is not None and calibration.judge:
            strata = calibration.strata
            return [Rule(each.entries, BY_COSINE, cosine, each.judge_threshold) for each in strata]
        return [Rule(0, BY_COSINE, cosine, None if self.second is None else self.second.boundary)]

    def rules_of(self, decisions: Sequence[LabelledDecision], tests: int) -> list[TenantRule] | None:
        """The rules of a tenant with these labels; None if a cosine by hand holds for all."""
        if self.cosine is not None or self.calibration is None:
            return None
        return tenant_rules(self.calibration, decisions, tests, self.max_error, CONFIDENCE)


class _Tenant(NamedTuple):
    """A tenant with labels: what these certify, if a calibration decides, and its rules with their judge."""

    decisions: Sequence[LabelledDecision]
    tests: int
    certified: Sequence[TenantRule] | None
    rules: Sequence[Rule]
    judge: Judge


class PairBook:
    """Pairs, labels and rules on a ``basis``; without a ``file`` there are no labels.

    Raises:
        Unsupported: the calibration does not certify the error bound.
    """

    def __init__(self, basis: Basis, file: LabelFile | None, most: int = MOST_PAIRS) -> None:
        self.basis = basis
        self.name = basis.name
        self.labelled = file is not None
        self._file = file
        self._common = basis.rules()
        self._common_judge = Judge(self._common, basis.second)
        self._seen: ByTenant[SeenPair] = ByTenant(most)
        self._lock = threading.Lock()
        self._importing = threading.Lock()
        self._tenants: Mapping[str, _Tenant] = self._read()

    def judge(self, tenant: str) -> Judge:
        """The judge of a tenant's requests."""
        own = self._tenants.get(tenant)
        return self._common_judge if own is None else own.judge

    def certificate(self, tenant: str, entries: int) -> str:
        """Which certificate a hit in a partition of so many entries is served by: see `Standing`."""
        if self.basis.cosine is not None:
            return BY_HAND
        own = self._tenants.get(tenant)
        if own is None or own.certified is None:
            return Standing.COMMON.value
        return own.certified[_place(own.rules, entries)].standing.value

    def record(
        self,
        tenant: str,
        partition: bytes,
        asked: str,
        near: Sequence[Neighbour],
        entries: int,
        verdict: Serve | Decline,
    ) -> None:
        """Remember a decision on a pair: one that is served, or that the second judge or a guard keeps apart."""
        neighbour, score, why = verdict.neighbour, verdict.score, "serve"
        if isinstance(verdict, Decline):
            why = str(verdict.why)
            if isinstance(verdict.why, Veto):
                neighbour = near[0] if near and near[0].cosine >= NEAR else None
                forbids = neighbour and veto(compare(traits(asked), traits(neighbour.text)))
                neighbour, why = (neighbour, str(forbids)) if forbids else (None, "")
            elif verdict.why is not Doubt.JUDGE_REFUSED:
                return
        if neighbour is None:
            return
        name = pair_id(tenant, partition, neighbour.text, asked)
        least = self._least(tenant, entries)
        pair = SeenPair(
            id=name,
            tenant=tenant,
            cached=neighbour.text,
            asked=asked,
            similarity=round(neighbour.cosine, 6),
            verdict=why,
            entries=entries,
            score=score,
            least=least,
            basis=self.name,
        )
        if math.isfinite(least):
            with self._lock:
                self._seen.put(tenant, name.encode(), pair)

    def export(self, tenant: str | None = None) -> list[SeenPair]:
        """The pairs of all tenants, or of one, each one's oldest first."""
        with self._lock:
            return self._seen.values(tenant)

    def label(self, labelled: Sequence[tuple[SeenPair, bool]]) -> Mapping[str, Any]:
        """Store labels of pairs with this basis, and certify their tenants' rules anew; returns how many count.

        Labels count for pairs that would be served; of others they are not stored.

        Raises:
            OSError: they cannot be stored.
        """
        assert self._file is not None
        served = [(pair, same) for pair, same in labelled if pair.verdict == "serve"]
        try:
            with self._importing:
                if served:
                    self._file.add(served)
                self._tenants = self._read()
        except Exception as error:
            raise OSError(f"--semantic-labels: {error}") from error
        return {"stored": len(served), "others": len(labelled) - len(served)}

    def state(self, tenant: str | None = None) -> Mapping[str, Any]:
        """The thresholds and what labels prove of them: the common ones, and of all tenants with labels or of one."""
        names = sorted(self._tenants) if tenant is None else [tenant] if tenant in self._tenants else []
        return {
            "threshold": self._shown_threshold(),
            "tenants": {name: self._shown_tenant(self._tenants[name]) for name in names},
        }

    def lines(self) -> list[str]:
        """What holds, as lines for the terminal."""
        if self.basis.cosine is None:
            return []
        claims = self._claims()
        shown = [
            f"semantic     of {each['served']} responses that labelled requests were served from {each['entries']} "
            f"entries on, {each['wrong']} were wrong: at most {each['bound']:.2%}"
            for each in claims
        ]
        unknown = (
            "semantic     no labels show how many of these responses are wrong; headrace cache calibrate ROWS "
            f"--threshold {self.basis.cosine:g} counts them"
        )
        head = f"semantic     served from a cosine of {self.basis.cosine:g} on, by hand: no error bound is certified"
        return [head, *(shown or [unknown])]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> dict[str, _Tenant]:
        found = {} if self._file is None else self._file.tenants()
        tenants = {}
        for name, labels in found.items():
            certified = self.basis.rules_of(labels.decisions, labels.tests)
            rules = self._common if certified is None else [each.rule for each in certified]
            judge = Judge(rules, self.basis.second)
            tenants[name] = _Tenant(labels.decisions, labels.tests, certified, rules, judge)
        return tenants

    def _least(self, tenant: str, entries: int) -> float:
        own = self._tenants.get(tenant)
        rules = self._common if own is None else own.rules
        return rules[_place(rules, entries)].threshold

    def _claims(self) -> list[dict[str, Any]]:
        cosine, calibration = self.basis.cosine, self.basis.calibration
        found = [] if cosine is None or calibration is None else calibration.claims(cosine, CONFIDENCE)
        return [
            {
                "entries": each.entries,
                "served": each.tally.served,
                "wrong": each.tally.wrong,
                "bound": each.bound,
            }
            for each in found
        ]

    def _shown_threshold(self) -> dict[str, Any]:
        basis = self.basis
        if basis.cosine is not None:
            return {"by": "hand", "cosine": basis.cosine, "confidence": CONFIDENCE, "claims": self._claims()}
        assert basis.calibration is not None
        found = basis.calibration.certificates(basis.max_error, CONFIDENCE)
        sizes = [
            {"entries": rule.entries}
            | (
                {"threshold": each.tally.threshold, **_counted(each.tally), "bound": each.bound}
                if isinstance(each, Certificate)
                else {"threshold": None}
            )
            for rule, each in zip(self._common, found, strict=True)
        ]
        return {
            "by": "calibration",
            "max_error": basis.max_error,
            "confidence": CONFIDENCE,
            "sizes": sizes,
        }

    def _shown_tenant(self, tenant: _Tenant) -> dict[str, Any]:
        shown: dict[str, Any] = {"labels": len(tenant.decisions), "imports": tenant.tests}
        if tenant.certified is not None:
            shown["sizes"] = [
                {
                    "entries": each.rule.entries,
                    "certificate": each.standing.value,
                    "threshold": each.rule.threshold if math.isfinite(each.rule.threshold) else None,
                    **_counted(each.tally),
                }
                for each in tenant.certified
            ]
        elif self.basis.cosine is not None:
            tally = count(tenant.decisions, self.basis.cosine)
            confidence = 1 - doubt_of_test(tenant.tests, CONFIDENCE)
            shown |= {**_counted(tally), "bound": upper_error(tally.wrong, tally.served, confidence)}
        return shown


def _place(rules: Sequence[Rule], entries: int) -> int:
    return max(0, bisect_right([rule.entries for rule in rules], entries) - 1)


def _counted(tally: Tally) -> dict[str, int]:
    return {"served": tally.served, "wrong": tally.wrong}


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
