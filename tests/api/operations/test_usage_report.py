from __future__ import annotations

import pytest

from headrace.api.auth.api_keys import Grant, Keys
from headrace.api.compile.policies import Rules
from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms
from tests.api.test_replies import quiet

PATH = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 5}
RULES = Rules(tenants=Tenants({"acme": TenantTerms(limits=TenantLimits(requests_per_minute=1))}))


@pytest.mark.parametrize("options", [{"rules": RULES}])
def test_usage_is_reported_by_tenant(house):
    for tenant in ("acme", "acme", "else"):
        house.client.post(PATH, json=BODY, headers={"X-Tenant-Id": tenant})
    quiet(house)
    reported = house.client.get("/v1/usage").json()
    assert [each["tenant"] for each in reported["data"]] == ["acme", "else"]
    acme, rest = reported["data"]
    assert (acme["requests"], acme["refused"]) == (1, {"tenant_limit": 1})
    assert acme["prompt_tokens"] == 3
    assert acme["limits"]["requests_per_minute"]["remaining"] == 0
    assert 0 < acme["limits"]["requests_per_minute"]["reset_seconds"] <= 61
    assert rest["limits"] == {}
    assert reported["has_more"] is False
    only = house.client.get("/v1/usage?tenant=else").json()["data"]
    assert [each["tenant"] for each in only] == ["else"]


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}])
def test_a_key_sees_its_own_tenant_alone(house):
    keys = Keys({"alpha": Grant()})
    for key in ("alpha", "beta"):
        house.client.post(PATH, json=BODY, headers={"Authorization": f"Bearer {key}"})
    quiet(house)
    alpha = {"Authorization": "Bearer alpha"}
    for query in ("", "?tenant=acme"):
        (reported,) = house.client.get("/v1/usage" + query, headers=alpha).json()["data"]
        assert (reported["tenant"], reported["requests"]) == (keys.identify("Bearer alpha").name, 1)
    assert house.client.get("/v1/usage").status_code == 401
