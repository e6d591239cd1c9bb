import math
import random

import pytest

from headrace.core.drafting import acceptance
from headrace.core.drafting.acceptance import Acceptance, Trials, compare


def test_compared() -> None:
    assert compare((1, 2, 3), [1, 2, 9]) == Trials(2, mismatched=True)
    assert compare((1, 2, 3), [1, 2]) == Trials(2, mismatched=False)
    assert compare((1, 2), [1, 2, 3]) == Trials(2, mismatched=False)
    assert compare((1,), []) == Trials(0, mismatched=False)


def test_a_new_source_starts_with_its_own_confidence() -> None:
    estimates = Acceptance().estimate("ngram", "t", "r", (0.1, 0.5, 0.9, 0.98))
    assert estimates == pytest.approx((0.1, 0.5, 0.9, 0.975), abs=0.05)


def test_a_request_with_rejected_drafts_is_learned_after_a_few_trials() -> None:
    learned = Acceptance()
    for _ in range(4):
        learned.learn("ngram", "t", "bad", (0.9,), Trials(0, mismatched=True))
    (bad,) = learned.estimate("ngram", "t", "bad", (0.9,))
    (other,) = learned.estimate("ngram", "t", "new", (0.9,))
    assert bad < 0.3 < other
    for _ in range(8):
        learned.learn("ngram", "t", "bad", (0.9,), Trials(1, mismatched=False))
    (again,) = learned.estimate("ngram", "t", "bad", (0.9,))
    assert again > 0.6, "it became good again"


def test_a_new_request_begins_where_its_tenant_is() -> None:
    learned = Acceptance()
    rng = random.Random(0)
    for each in range(60):
        for tenant, chance in (("good", 0.95), ("bad", 0.1)):
            for _ in range(5):
                right = rng.random() < chance
                learned.learn(
                    "ngram", tenant, f"{tenant}{each}", (0.7,), Trials(int(right), mismatched=not right)
                )
            learned.ended(f"{tenant}{each}")
    (good,) = learned.estimate("ngram", "good", "new", (0.7,))
    (bad,) = learned.estimate("ngram", "bad", "new", (0.7,))
    assert good > 0.85
    assert bad < 0.2


def test_sources_are_apart() -> None:
    learned = Acceptance()
    for _ in range(50):
        learned.learn("ngram", "t", "r", (0.5,), Trials(0, mismatched=True))
    assert learned.estimate("suffix", "t", "r", (0.5,)) == pytest.approx((0.5,), abs=0.05)


def test_estimates_become_calibrated() -> None:
    """A source whose confidence is far off: of the tokens estimated at p, the share p is right."""
    rng = random.Random(1)
    learned = Acceptance()
    sums: dict[int, list[float]] = {}
    for each in range(300):
        lean = rng.gauss(0, 1)
        for step in range(30):
            said = tuple(rng.choice((0.3, 0.6, 0.9, 0.95)) for _ in range(4))
            true = [1 / (1 + math.exp(-(2 * (c - 0.6) / 0.3 + lean - 0.5))) for c in said]
            estimates = learned.estimate("s", "t", str(each), said)
            right = 0
            while right < 4 and rng.random() < true[right]:
                right += 1
            if each > 50 and step > 5:
                for at in range(min(4, right + 1)):
                    cell = sums.setdefault(min(9, int(10 * estimates[at])), [0.0, 0.0, 0.0])
                    cell[0] += estimates[at]
                    cell[1] += at < right
                    cell[2] += 1
            learned.learn("s", "t", str(each), said, Trials(right, mismatched=right < 4))
        learned.ended(str(each))
    trials = sum(cell[2] for cell in sums.values())
    error = sum(abs(cell[0] - cell[1]) for cell in sums.values()) / trials
    assert error < 0.04


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "MAX_TENANTS", 10)
    learned = Acceptance()
    for each in range(100):
        learned.learn("s", f"t{each}", f"r{each}", (0.5,), Trials(1, mismatched=False))
        learned.ended(f"r{each}")
    assert len(learned._tenants) == 10
    assert not learned._requests


def test_extreme_histories_stay_finite() -> None:
    learned = Acceptance()
    for _ in range(5000):
        learned.learn("s", "t", "r", (1.0, 1.0), Trials(2, mismatched=False))
    for _ in range(5000):
        learned.learn("s", "t", "r", (0.0, 1.0), Trials(0, mismatched=True))
    assert all(0 < each < 1 for each in learned.estimate("s", "t", "r", (0.0, 1.0, 0.5) * 10))
