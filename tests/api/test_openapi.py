import json
from pathlib import Path

import pytest
from starlette.routing import Route

from headrace.api.openapi import describe, described
from headrace.service.embedding_models import PoolingModels
from tests.doubles.pooling_models import LetterModel


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    models = PoolingModels(LetterModel(max_tokens=99))
    return {"batch_path": tmp_path, "embedding_models": models}


def test_every_route_is_described_and_every_description_is_a_route(house):
    app = house.client.app._app
    routes = {(m.lower(), r.path.replace(":path", "")) for r in app.routes for m in r.methods - {"HEAD"}}
    assert all(isinstance(route, Route) for route in app.routes)
    shown = {(method, path) for path, item in describe("0")["paths"].items() for method in item}
    pages = {("get", f"/{name}") for name in ("", "chat", "dashboard", "dashboard/{file}", "docs")}
    assert routes - shown == {*pages, ("get", "/openapi.json"), ("post", "/ping")}
    assert shown <= routes


def test_the_document_has_no_loose_ends():
    document = describe("1.2.3")
    assert document["info"]["version"] == "1.2.3"
    text = json.dumps(document)
    for part in text.split('"$ref": "')[1:]:
        name = part.split('"')[0].removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"], name


def test_every_example_works(house):
    for row in described():
        if row.example is not None:
            named = {"model": "fox"} if "model" in row.example else {}
            answer = house.client.request(row.method, row.path, json=row.example | named)
            needs_traffic = row.path == "/v1/experiments/dry-run"  # its body is right all the same
            assert "no_dry_run" in answer.text if needs_traffic else answer.is_success, answer.text


def test_the_page_stands_alone(house):
    page = house.client.get("/docs").text
    assert "/v1/chat/completions" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "/*OPENAPI*/null" not in page
