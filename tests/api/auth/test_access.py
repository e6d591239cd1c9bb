from __future__ import annotations

import pytest

from headrace.api.app import access_table
from headrace.api.auth.access import (
    Access,
    AccessCheck,
    HostRefused,
    Hosts,
    KeyRequired,
    OriginCheck,
    OriginRefused,
    RoleRequired,
    allowed_host_problem,
    allowed_origin_problem,
    route_path,
    tenant_of,
)
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


LOCAL = Hosts(bound="127.0.0.1")
HERE = "127.0.0.1:8000"


def verdict(check: OriginCheck, method: str = "POST", keys: bool = False, **headers: str) -> str:
    try:
        check.check(method, {name.replace("_", "-"): value for name, value in headers.items()}, keys)
    except HostRefused:
        return "host"
    except OriginRefused:
        return "origin"
    return "served"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1:8000",
            "127.0.0.1",
            "localhost",
            "LOCALHOST:8000",
            "localhost.:8000",
            "app.localhost:8000",
        ),
        *("[::1]:8000", "[::1]", "192.168.1.5:8000", "10.0.0.7", "0.0.0.0:8000", "[fe80::1%25eth0]:8000"),
    ],
)
def test_addresses_and_localhost_are_served(host):
    assert verdict(OriginCheck(hosts=LOCAL), host=host) == "served"
    assert verdict(OriginCheck(hosts=Hosts(("llm.example",))), host=host) == "served"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "notlocalhost",
        ),
        *(
            "127.0.0.1@evil.example",
            "evil.example.",
            "",
            "localhost,evil.example",
            "[evil.example]:8000",
            "a b",
        ),
    ],
)
def test_other_names_are_refused_on_a_loopback_address(host):
    assert verdict(OriginCheck(hosts=LOCAL), "GET", host=host) == "host"


def test_names_are_refused_only_where_they_are_known_or_no_key_is_needed():
    assert (
        verdict(OriginCheck(hosts=Hosts()), host="llm.example") == "served"
    )  # a container, or behind a proxy
    assert verdict(OriginCheck(hosts=LOCAL), keys=True, host="llm.example") == "served"
    named = OriginCheck(hosts=Hosts(("llm.example",)))
    assert verdict(named, keys=True, host="other.example") == "host"
    assert verdict(OriginCheck(hosts=Hosts(bound="workstation")), host="Workstation:8000") == "served"
    assert verdict(OriginCheck(hosts=Hosts(bound="::1")), host="") == "host"
    assert verdict(OriginCheck(hosts=Hosts(bound="::1")), host="[::1]:8000") == "served"
    assert verdict(OriginCheck(hosts=LOCAL)) == "served"  # HTTP/1.0 without Host: no browser


@pytest.mark.parametrize(
    ("allowed", "host", "expected"),
    [
        ("llm.example", "LLM.example:443", "served"),
        ("llm.example.", "llm.example", "served"),
        ("LLM.example", "llm.example.", "served"),
        ("llm.example", "x.llm.example", "host"),
        ("*.example", "llm.example", "served"),
        ("*.example", "a.b.example", "served"),
        ("*.example", "example", "host"),
        ("*.example", "evilexample", "host"),
        ("*", "anything.example", "served"),
    ],
)
def test_allowed_hosts(allowed, host, expected):
    assert verdict(OriginCheck(hosts=Hosts((allowed,), "127.0.0.1")), host=host) == expected


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (HERE, "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("LocalHost:8000", "http://localhost:8000"),
        ("localhost.:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("llm.example", "https://llm.example"),  # TLS ends at a proxy
        ("llm.example", "https://llm.example:443"),
        ("llm.example:8443", "https://llm.example:8443"),
    ],
)
def test_pages_of_the_server_itself_are_served(host, origin):
    assert verdict(OriginCheck(), host=host, origin=origin, sec_fetch_site="same-origin") == "served"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "http://127.0.0.1:3000", "http://localhost:8000", "null", "", "file://"),
        *(
            "chrome-extension://abcdef",
            "http://127.0.0.1.evil.example:8000",
            "127.0.0.1:8000",
            "http://127.0.0.1",
        ),
        *("app://127.0.0.1:8000", "https://127.0.0.1", "http://127.0.0.1:8000@evil.example"),
    ],
)
def test_pages_of_other_origins_are_refused(method, origin):
    assert verdict(OriginCheck(), method, host=HERE, origin=origin) == "origin"
    assert verdict(OriginCheck(), method, keys=True, host=HERE, origin=origin) == "origin"
    assert verdict(OriginCheck(), method, host=HERE, origin=origin, sec_fetch_site="same-origin") == "origin"


def test_an_opaque_origin_is_none_of_the_server():
    assert verdict(OriginCheck(), host="null", origin="null") == "origin"
    assert verdict(OriginCheck(["https://page.example"]), host=HERE, origin="null") == "origin"
    assert verdict(OriginCheck(["null"]), host=HERE, origin="null") == "served"


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ("https://page.example", "https://page.example"),
        ("https://Page.example/", "https://page.example"),
        ("https://page.example:443", "https://page.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("*", "https://any.example"),
        ("*", "null"),
    ],
)
def test_allowed_origins_are_served_though_their_site_is_another(allowed, origin):
    check = OriginCheck([allowed])
    assert verdict(check, host=HERE, origin=origin, sec_fetch_site="cross-site") == "served"


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site", "future-word"])
def test_other_sites_are_refused_without_an_origin_but_for_links(site):
    check = OriginCheck()
    page = {"host": HERE, "sec_fetch_site": site}
    assert verdict(check, "GET", **page, sec_fetch_mode="no-cors", sec_fetch_dest="image") == "origin"
    link = page | {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert verdict(check, "GET", **link) == "served"
    assert verdict(check, "POST", **link) == "origin"
    assert verdict(check, "GET", **(link | {"sec_fetch_dest": "iframe"})) == "origin"


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_pages_of_the_server_and_the_user_are_served(site):
    assert verdict(OriginCheck(), "GET", host=HERE, sec_fetch_site=site) == "served"


def test_a_proxy_names_the_host_that_the_browser_asked():
    page = {"host": "backend:8000", "origin": "https://llm.example"}
    assert verdict(OriginCheck(), **page) == "origin"
    assert verdict(OriginCheck(), **page, x_forwarded_host="llm.example") == "served"
    assert verdict(OriginCheck(), **page, x_forwarded_host="llm.example, inner") == "served"
    assert verdict(OriginCheck(), **page, x_forwarded_host="other.example") == "origin"
    assert verdict(OriginCheck(["https://llm.example"]), **page) == "served"
    rebound = {"host": "evil.example", "origin": "http://evil.example", "x_forwarded_host": "localhost"}
    assert verdict(OriginCheck(hosts=LOCAL), **rebound) == "host"


@pytest.mark.parametrize(
    "text", ["llm.example", "*.llm.example", "*", "workstation", "10.0.0.1", "::1", "[::1]", "a."]
)
def test_usable_allowed_hosts(text):
    assert allowed_host_problem(text) == ""


@pytest.mark.parametrize(
    "text", ["https://llm.example", "llm.example:8000", "llm.example/", "a*b", "*.", "", "a b", "**"]
)
def test_allowed_hosts_that_match_nothing_are_named(text):
    assert "host name without scheme" in allowed_host_problem(text)


@pytest.mark.parametrize(
    "text", ["https://a.example", "http://localhost:3000/", "*", "null", "chrome-extension://abc"]
)
def test_usable_allowed_origins(text):
    assert allowed_origin_problem(text) == ""


@pytest.mark.parametrize(
    "text", ["page.example", "https://page.example/path", "https://a.example?x", "localhost:3000", ""]
)
def test_allowed_origins_that_match_nothing_are_named(text):
    assert "expected an origin" in allowed_origin_problem(text)
