import random

from headrace.response_cache.rules.semantic.audit_rate import COOL_DOWN, AuditRate


def audit(rate, errors, count, seed=0):
    """Audits of which a share is wrong; the reasons of all changes."""
    rng = random.Random(seed)
    return [why for _ in range(count) if (why := rate.observe(rng.random() < errors))]


def test_errors_near_the_bound_raise_the_rate_up_to_its_limit():
    rate = AuditRate(0.02, 0.02, adapts=True)
    changes = audit(rate, 0.03, 4000)
    assert rate.share == 0.16
    assert len(changes) == 3
    assert "error bound 0.02" in changes[0]
    whole = AuditRate(0.5, 0.02, adapts=True)
    audit(whole, 0.03, 4000)
    assert whole.share == 1.0


def test_few_errors_lower_it_to_half_and_no_further():
    rate = AuditRate(0.02, 0.02, adapts=True)
    audit(rate, 0.0, 2000)
    assert rate.share == 0.01


def test_errors_between_the_bounds_change_little():
    changes = audit(AuditRate(0.02, 0.2, adapts=True), 0.075, 4000)
    assert len(changes) <= 6, "noise of the smoothed errors, damped by hysteresis and cool-down"


def test_it_does_not_change_within_the_cool_down_or_if_it_does_not_adapt():
    rate = AuditRate(0.02, 0.02, adapts=True)
    assert audit(rate, 1.0, COOL_DOWN - 1) == []
    assert len(audit(rate, 1.0, COOL_DOWN)) == 1
    fixed = AuditRate(0.02, 0.02, adapts=False)
    assert audit(fixed, 1.0, 1000) == []
    assert fixed.share == 0.02
