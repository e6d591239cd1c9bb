from __future__ import annotations

import pytest

from headrace.api.auth.origin import (
    HostRefused,
    Hosts,
    OriginCheck,
    OriginRefused,
    allowed_host_problem,
    allowed_origin_problem,
)

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
