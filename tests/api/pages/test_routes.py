"""Pages, their headers, and what the stream shows to each key."""

import gzip
import json
import re

import pytest

from headrace.api.auth.api_keys import Grant, Role

GRANTS = {
    "tenant": Grant("acme"),
    "metrics": Grant(None, Role.METRICS),
    "admin": Grant(None, Role.ADMIN),
}


@pytest.fixture
def options():
    return {"grants": GRANTS}


def snapshots(house, key, query="?count=1"):
    headers = {"Authorization": f"Bearer {key}"}
    answer = house.client.get(f"/v1/dashboard/stream{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event]


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_page_loads_nothing_from_elsewhere(house, path):
    answer = house.client.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert "//" not in re.sub(r"<!doctype[^>]*>", "", answer.text)
    assert "<script>" not in answer.text
    assert "style=" not in answer.text


def test_the_files_that_a_page_names_may_be_kept_for_good(house):
    for path in ("/", "/dashboard"):
        page = house.client.get(path)
        assert page.headers["cache-control"] == "no-cache"
        named = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
        assert named
        for each in named:
            file = house.client.get(f"/{each}")
            assert file.status_code == 200, each
            assert "immutable" in file.headers["cache-control"]
    assert house.client.get("/dashboard/app.js").headers["cache-control"] == "no-cache"
    assert house.client.get("/dashboard/app.js?v=old").headers["cache-control"] == "no-cache"


def test_a_file_that_the_browser_has_is_not_sent_again(house):
    first = house.client.get("/dashboard/app.css")
    again = house.client.get("/dashboard/app.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert house.client.get("/dashboard/app.css", headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_file_is_compressed_for_browsers_that_accept_it(house):
    whole = house.client.get("/dashboard/app.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in whole.headers
    with house.client.stream("GET", "/dashboard/app.js", headers={"Accept-Encoding": "br, gzip"}) as small:
        raw = b"".join(small.iter_raw())
    assert small.headers["content-encoding"] == "gzip"
    assert len(raw) < len(whole.content) / 2
    assert gzip.decompress(raw) == whole.content


@pytest.mark.parametrize("file", ["none.js", "dashboard.html", "manifest.json", "assets.py"])
def test_other_files_are_not_served(house, file):
    answer = house.client.get(f"/dashboard/{file}")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


def test_an_inference_key_sees_its_tenant_and_others_the_server(house):
    assert snapshots(house, "tenant")[0]["tenant"] == "acme"
    assert snapshots(house, "metrics")[0]["tenant"] is None
    assert snapshots(house, "admin")[0]["tenant"] is None


@pytest.mark.parametrize("options", [{}])
def test_without_keys_the_whole_server_is_shown(house):
    assert snapshots(house, "none", "?part=requests&count=1")[0] == {
        "part": "requests",
        "tenant": None,
        "round": 1,
    }


def test_single_requests_are_not_for_metrics_keys(house):
    headers = {"Authorization": "Bearer metrics"}
    refused = house.client.get("/v1/dashboard/stream?part=requests", headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "part")
    for part in ("caches", "tenants"):
        assert snapshots(house, "metrics", f"?part={part}&count=1")[0]["part"] == part
    assert snapshots(house, "tenant", "?part=requests&count=1")[0]["part"] == "requests"


@pytest.mark.parametrize("query", ["part=overview", "count=0", "count=-1", "count=x", "count=1000001"])
def test_a_wrong_query_is_refused_by_name(house, query):
    headers = {"Authorization": "Bearer admin"}
    answer = house.client.get(f"/v1/dashboard/stream?{query}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_snapshots_follow_one_another(house):
    rounds = [each["round"] for each in snapshots(house, "admin", "?count=3")]
    assert rounds == [1, 2, 3]
