import pytest

from headrace.api.app import access_table
from headrace.api.auth.access import Access, AccessCheck, KeyRequired, RoleRequired, route_path, tenant_of
from headrace.api.auth.api_keys import Grant, Identity, Keys, Role

ROUTES = access_table([])
KEYS = Keys({"user": Grant("acme"), "reader": Grant(None, Role.METRICS), "root": Grant(None, Role.ADMIN)})


def test_without_keys_every_route_is_open():
    check = AccessCheck(Keys({}), ROUTES)
    assert check.identity("POST", "/reset_prefix_cache", None) is None
    assert check.identity("POST", "/reset_prefix_cache", "Bearer any") is None


def test_a_public_route_needs_no_key_and_still_knows_one():
    check = AccessCheck(KEYS, ROUTES)
    assert check.identity("GET", "/health", None) is None
    assert check.identity("GET", "/health", "Bearer user").name == "acme"


@pytest.mark.parametrize("path", ["/v1/completions", "/unknown"])
def test_other_routes_need_a_key(path):
    with pytest.raises(KeyRequired):
        AccessCheck(KEYS, ROUTES).identity("POST", path, "Bearer wrong")


def test_an_insufficient_role_gets_an_error_that_names_the_required_one():
    check = AccessCheck(KEYS, ROUTES)
    with pytest.raises(RoleRequired) as error:
        check.identity("POST", "/reset_prefix_cache", "Bearer user")
    assert error.value.access is Access.ADMIN
    with pytest.raises(RoleRequired):
        check.identity("POST", "/v1/completions", "Bearer reader")
    assert check.identity("POST", "/reset_prefix_cache", "Bearer root").role is Role.ADMIN


@pytest.mark.parametrize(
    ("method", "path", "access"),
    [
        ("HEAD", "/metrics", Access.METRICS),
        ("GET", "/v1/models/org/name", Access.INFERENCE),
        ("GET", "/v1/requests/cmpl-1", Access.INFERENCE),
        ("POST", "/reset_prefix_cache\n", Access.ADMIN),  # the router matches this path too
        ("GET", "/reset_prefix_cache", Access.ANY_KEY),  # ends in a 405
        ("POST", "/nothing", Access.ANY_KEY),
    ],
)
def test_paths_are_matched_as_the_router_does(method, path, access):
    assert AccessCheck(KEYS, ROUTES).access(method, path) is access


@pytest.mark.parametrize(
    ("path", "root", "route"),
    [
        ("/metrics", "", "/metrics"),
        ("/llm/metrics", "/llm", "/metrics"),
        ("/llm/metrics", "/llm/", "/metrics"),
        ("/llmetrics", "/ll", "/llmetrics"),
    ],
)
def test_the_prefix_of_a_mounted_application_is_ignored(path, root, route):
    assert route_path(path, root) == route


def test_a_tenant_key_is_bound_to_its_tenant_and_an_admin_key_to_none():
    assert tenant_of(None, "claimed") == (None, "claimed")
    assert tenant_of(Identity("acme", Role.INFERENCE, True), "claimed")[0] == "acme"
    assert tenant_of(Identity("key-1", Role.ADMIN), None) == (None, None)
    assert tenant_of(Identity("ops", Role.ADMIN, True), None) == (None, "ops")
    assert tenant_of(Identity("ops", Role.ADMIN, True), "acme") == (None, "acme")
