from __future__ import annotations

from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms


def test_an_unnamed_tenant_has_the_default_terms() -> None:
    acme = TenantTerms(weight=3.0)
    tenants = Tenants({"acme": acme}, TenantTerms(weight=0.5))
    assert tenants.terms("acme") is acme
    assert tenants.terms("somebody").weight == 0.5


def test_weights_are_in_units_of_the_default_weight() -> None:
    tenants = Tenants({"acme": TenantTerms(weight=3.0)}, TenantTerms(weight=0.5))
    assert tenants.weights() == {"acme": 6.0}


def test_a_model_may_have_limits_of_its_own() -> None:
    own = TenantLimits(requests_per_minute=1)
    terms = TenantTerms(limits=TenantLimits(requests_per_minute=9), models={"large": own})
    assert terms.limits_of("large") is own
    assert terms.limits_of("small").requests_per_minute == 9


def test_classes() -> None:
    assert TenantTerms().may_use("priority")
    terms = TenantTerms(default_class="flex", classes=frozenset({"default"}))
    assert terms.may_use("default")
    assert terms.may_use("flex")
    assert not terms.may_use("priority")
