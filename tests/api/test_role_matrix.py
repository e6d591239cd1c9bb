"""The role matrix: every route of the application, with every kind of key, and the status that each gets."""

import pytest
from starlette.routing import Route

from headrace.api import routing
from headrace.api.app import access_table, create_app
from headrace.api.auth.access import ALLOWED, Access
from headrace.api.auth.api_keys import Grant, Role
from headrace.api.openapi import described
from headrace.service.embedding_models import PoolingModels
from tests.doubles.pooling_models import LetterModel, LetterPairs

ROUTES = access_table([])
GRANTS = {
    "tenant": Grant("acme"),
    "other": Grant("globex"),
    "metrics": Grant(None, Role.METRICS),
    "admin": Grant(None, Role.ADMIN),
}
ROLES = {"none": None} | {name: grant.role for name, grant in GRANTS.items()}

BODIES = {
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "POST /v1/completions": {"prompt": "x", "max_tokens": 1},
    "POST /v1/responses": {"input": "x", "max_output_tokens": 1},
    "POST /v1/responses/compact": {"model": "fox", "input": "x"},
    "POST /v1/responses/input_tokens": {"input": "x"},
    "POST /v1/messages": {
        "model": "fox",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
    },
    "POST /v1/messages/count_tokens": {"model": "fox", "messages": [{"role": "user", "content": "Hi"}]},
    "POST /v1/embeddings": {"input": "x"},
    **{
        key: {"query": "x", "documents": ["y"]}
        for key in ("POST /v1/rerank", "POST /rerank", "POST /v2/rerank")
    },
    **{key: {"text_1": "x", "text_2": "y"} for key in ("POST /v1/score", "POST /score")},
    "POST /tokenize": {"prompt": "x"},
    "POST /detokenize": {"tokens": [1]},
    "POST /abort_request": {"request_id": "OWN"},
    "POST /v1/cache/clear": {"scope": "tenant"},
    "POST /v1/cache/feedback": {"id": "OWN"},
    "POST /v1/cache/warm": {"requests": []},
    "POST /v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "/adapters/sql"},
    "POST /v1/unload_lora_adapter": {"lora_name": "sql"},
    "POST /v1/tuner": {"mode": "off"},
    "POST /v1/simulations": {"requests": [{"prompt_tokens": 8, "output_tokens": 2}]},
    "POST /v1/experiments": {"setting": "max_running", "treatment": 4, "metric": "requests_per_second"},
    "POST /v1/experiments/dry-run": {
        "setting": "max_running",
        "treatment": 2,
        "metric": "requests_per_second",
    },
    "POST /v1/batches": {"input_file_id": "OWN", "endpoint": "/v1/completions", "completion_window": "24h"},
}
OWNED = (
    "GET /v1/requests/{id}",
    "GET /v1/requests/{id}/timeline",
    "POST /abort_request",
    "POST /v1/cache/feedback",
)
"""Routes about one request. It belongs to the tenant ``acme``; by now it has ended, and was not cached."""

RESULTS = {route: {"tenant": 200, "other": 404, "admin": 200} for route in OWNED[:2]}
RESULTS |= {route: {"tenant": 404, "other": 404, "admin": 404} for route in OWNED[2:]}

MISSING = ("GET /v1/files/{id}", "GET /v1/files/{id}/content", "DELETE /v1/files/{id}", "POST /v1/batches")
MISSING += ("GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel")
MISSING += ("GET /v1/responses/{id}", "DELETE /v1/responses/{id}", "POST /v1/responses/{id}/cancel")
MISSING += ("GET /v1/responses/{id}/input_items", "DELETE /v1/sessions/{id}")
"""Routes about a response, a session, a file or a batch that no tenant has; ``POST /v1/files`` gets no form."""

RESULTS |= {route: {"tenant": 404, "other": 404, "admin": 404} for route in MISSING}
RESULTS |= {f"{method} /v1/cache/pairs": {"admin": 404} for method in ("GET", "POST")}
"""Without a semantic cache there are no pairs."""
RESULTS |= {f"{method} /v1/experiments/{{id}}": {"admin": 404} for method in ("GET", "DELETE")}
RESULTS |= {"POST /v1/experiments": {"admin": 201}, "POST /v1/experiments/dry-run": {"admin": 409}}
"""A dry run repeats the load of the server, which has answered too few requests here."""

PAUSES = ("POST /pause", "POST /resume", "POST /sleep", "POST /wake_up")
"""Sent last: between the first and the second of each two, requests are rejected."""

IN_ORDER = sorted(ROUTES, key=lambda route: (route in PAUSES, route))

RESULTS |= {"POST /v1/files": {"tenant": 400, "other": 400, "admin": 400}}


QUERIES = {"GET /v1/dashboard/stream": "?count=1"}
"""Queries of routes whose response has no end by itself."""


def bearer(key):
    return {} if key == "none" else {"Authorization": f"Bearer {key}"}


def expected(route, key):
    """The status of ``route`` for ``key``, by the table of roles."""
    access = ROUTES[route]
    if access is not Access.PUBLIC:
        if key == "none":
            return 401
        if ROLES[key] not in ALLOWED[access]:
            return 403
    return RESULTS.get(route, {}).get(key, 200)


@pytest.fixture
def options(tmp_path):
    models = PoolingModels(LetterModel(), LetterPairs("pairs"))
    return {"grants": GRANTS, "batch_path": tmp_path, "embedding_models": models}


@pytest.fixture
def own(house):
    """The id of a request of the tenant ``acme``."""
    body = BODIES["POST /v1/completions"]
    return house.client.post("/v1/completions", json=body, headers=bearer("tenant")).json()["id"]


def send(house, route, key, own):
    method, path = route.split(" ")
    path = path.replace("{model:path}", "fox").replace("{id}", own).replace("{file}", "app.js")
    path += QUERIES.get(route, "")
    body = {name: own if value == "OWN" else value for name, value in BODIES.get(route, {}).items()}
    return house.client.request(method, path, json=body or None, headers=bearer(key))


def test_a_whole_server_mounts_every_route_that_is_described_and_no_other(house):
    assert {row.key for route in house.routes for row in route.rows} == ROUTES.keys()


def test_a_route_without_its_access_stops_the_start(house):
    with pytest.raises(ValueError, match="no access is declared for the route /open"):
        create_app(house.lookup, [*house.routes, Route("/open", lambda request: None)], None)


def test_a_route_with_two_kinds_of_access_stops_the_start(house):
    class Open(routing.Endpoints):
        @routing.route("POST /pause", Access.PUBLIC)
        async def pause(self, request): ...

    with pytest.raises(ValueError, match="POST /pause"):
        create_app(house.lookup, [*house.routes, *Open().routes()], None)


@pytest.mark.parametrize("access", [None, "public"])
def test_a_handler_without_an_access_is_refused_where_it_is_declared(access):
    with pytest.raises(TypeError, match="GET /open"):
        routing.route("GET /open", access)


@pytest.mark.parametrize("key", ROLES)
def test_each_route_gives_each_key_what_the_table_says(house, own, key):
    statuses = {route: send(house, route, key, own).status_code for route in IN_ORDER}
    assert {route: got for route, got in statuses.items() if route not in ("POST /v1/cache/warm",)} == {
        route: expected(route, key) for route in sorted(ROUTES) if route not in ("POST /v1/cache/warm",)
    }
    warm = expected("POST /v1/cache/warm", key)
    assert statuses["POST /v1/cache/warm"] == (202 if warm == 200 else warm)


def test_the_matrix_in_plain_numbers(house, own):
    """A few cells, written down by hand, so that a wrong table does not confirm itself."""
    keys = ("none", "tenant", "other", "metrics", "admin")
    cells = {
        "GET /health": (200, 200, 200, 200, 200),
        "GET /docs": (200, 200, 200, 200, 200),
        "GET /metrics": (401, 403, 403, 200, 200),
        "GET /": (200, 200, 200, 200, 200),
        "GET /dashboard": (200, 200, 200, 200, 200),
        "GET /v1/dashboard/stream": (401, 200, 200, 200, 200),
        "GET /server_info": (401, 200, 200, 200, 200),
        "POST /v1/completions": (401, 200, 200, 403, 200),
        "GET /v1/requests/{id}": (401, 200, 404, 403, 200),
        "GET /v1/requests/{id}/timeline": (401, 200, 404, 403, 200),
        "GET /v1/steps": (401, 403, 403, 403, 200),
        "POST /v1/simulations": (401, 200, 200, 200, 200),
        "GET /v1/usage": (401, 200, 200, 403, 200),
        "GET /v1/cache/stats": (401, 200, 200, 403, 200),
        "POST /reset_prefix_cache": (401, 403, 403, 403, 200),
        "POST /pause": (401, 403, 403, 403, 200),
        "POST /resume": (401, 403, 403, 403, 200),
        "GET /is_sleeping": (401, 200, 200, 200, 200),
        "POST /sleep": (401, 403, 403, 403, 200),
        "POST /wake_up": (401, 403, 403, 403, 200),
    }
    for route, statuses in cells.items():
        assert tuple(send(house, route, key, own).status_code for key in keys) == statuses, route


@pytest.mark.parametrize("options", [{"keys": ("alpha",)}])
def test_with_inference_keys_alone_administration_is_closed_and_says_how_to_open_it(house):
    for method, path, option in (
        ("POST", "/reset_prefix_cache", "--admin-key"),
        ("POST", "/reset_prefix_cache%0A", "--admin-key"),
        ("POST", "/pause", "--admin-key"),
        ("GET", "/metrics", "--metrics-port"),
        ("HEAD", "/metrics", None),
    ):
        answer = house.client.request(method, path, headers=bearer("alpha"))
        assert answer.status_code == 403
        if option:
            assert answer.json()["error"]["code"] == "not_allowed"
            assert option in answer.json()["error"]["message"]


@pytest.mark.parametrize("options", [{}])
def test_without_keys_every_route_is_open(house):
    body = BODIES["POST /v1/completions"]
    own = house.client.post("/v1/completions", json=body).json()["id"]
    for route in IN_ORDER:
        assert send(house, route, "none", own).status_code in (200, 201, 202, 404, 409), route


def test_a_tenant_sees_its_own_usage_and_cache_and_an_admin_sees_all(house, own):
    for key in ("tenant", "other"):
        for _ in range(2):
            send(house, "POST /v1/chat/completions", key, own)
    usage = "/v1/usage?tenant=globex"
    assert [each["tenant"] for each in house.client.get(usage, headers=bearer("tenant")).json()["data"]] == [
        "acme"
    ]
    assert [each["tenant"] for each in house.client.get(usage, headers=bearer("admin")).json()["data"]] == [
        "globex"
    ]
    every = house.client.get("/v1/usage", headers=bearer("admin")).json()["data"]
    assert {"acme", "globex"} <= {each["tenant"] for each in every}
    stats = house.client.get("/v1/cache/stats", headers=bearer("tenant")).json()
    assert stats["tenant"] == "acme"
    assert stats["layers"]["prefix"]["hits"] == 1
    assert "bypasses" in house.client.get("/v1/cache/stats", headers=bearer("admin")).json()


def test_only_an_admin_clears_all_and_computes_the_history(house):
    for path, body in (("/v1/cache/clear", {"scope": "all"}), ("/v1/cache/warm", {"from_history": True})):
        assert house.client.post(path, json=body, headers=bearer("tenant")).status_code == 403
        assert house.client.post(path, json=body, headers=bearer("admin")).is_success


def test_an_admin_acts_for_the_tenant_that_it_names(house):
    body = BODIES["POST /v1/completions"]
    headers = bearer("admin") | {"X-Tenant-Id": "acme"}
    answer = house.client.post("/v1/completions", json=body, headers=headers).json()
    assert (
        house.client.get(f"/v1/requests/{answer['id']}", headers=bearer("tenant")).json()["tenant"] == "acme"
    )
    assert house.client.get(f"/v1/requests/{answer['id']}", headers=bearer("other")).status_code == 404


def test_the_metrics_port_has_health_and_metrics_alone():
    served = {row.key: row.access for row in described() if row.metrics_port}
    health = ("/health", "/health/ready", "/healthz", "/livez", "/readyz", "/ping", "/version")
    assert served == {
        **{f"GET {path}": Access.PUBLIC for path in health},
        "POST /ping": Access.PUBLIC,
        "GET /metrics": Access.METRICS,
    }
