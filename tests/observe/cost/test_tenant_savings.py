from __future__ import annotations

from headrace.core.events import AdmitReason, Admitted, Arrived, Finished, Layer, Spared
from headrace.core.request import FinishReason
from headrace.observe.cost import tenant_savings
from headrace.observe.cost.prices import TokenPrices
from headrace.observe.cost.tenant_savings import TenantSavings


def test_each_tenant_has_its_own_hits_and_savings() -> None:
    savings = TenantSavings(lambda: TokenPrices(prompt=1.0, output=2.0))
    savings.fold(Spared("r1", "acme", Layer.EXACT, 1_000_000, 500_000, 0.0), 0.0)
    savings.fold(Spared("r2", "acme", Layer.EXACT, 0, 0, 0.0), 0.0)
    savings.fold(Spared("r3", "globex", Layer.COALESCED, 10, 20, 0.0), 0.0)
    assert savings.stats("acme") == {
        "tenant": "acme",
        "layers": {
            "exact": {
                "hits": 2,
                "saved_prompt_tokens": 1_000_000,
                "saved_output_tokens": 500_000,
                "saved_cost": 2.0,
            }
        },
    }
    assert savings.stats("globex")["layers"].keys() == {"coalesced"}
    assert savings.stats("unknown") == {"tenant": "unknown", "layers": {}}


def test_tenants_beyond_the_limit_are_counted_together(monkeypatch) -> None:
    monkeypatch.setattr(tenant_savings, "MAX_TENANTS", 1)
    savings = TenantSavings()
    for tenant in ("first", "second", "third", "first"):
        savings.fold(Spared("r", tenant, Layer.EXACT, 1, 1, 0.0), 0.0)
    assert savings.stats("first")["layers"]["exact"]["hits"] == 2
    assert savings.stats("other")["layers"]["exact"]["hits"] == 2
    assert savings.stats("second")["layers"] == {}


def test_a_cached_prefix_counts_once_for_the_tenant_of_its_request() -> None:
    savings = TenantSavings()
    savings.fold(Arrived("r", 40, "acme", 0), 0.0)
    savings.fold(Admitted("r", AdmitReason.NEW, 16, 40), 0.0)
    savings.fold(Admitted("r", AdmitReason.RESUMED, 32, 41), 0.0)
    savings.fold(Finished("r", FinishReason.STOP, 40, 1, 16), 0.0)
    savings.fold(Admitted("r", AdmitReason.NEW, 16, 40), 0.0)
    prefix = savings.stats("acme")["layers"]["prefix"]
    assert (prefix["hits"], prefix["saved_prompt_tokens"]) == (1, 16)
