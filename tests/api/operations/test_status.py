from __future__ import annotations

import threading
import time

import pytest

from headrace.api.auth.api_keys import Grant, Keys
from headrace.api.compile.policies import Rules
from headrace.api.operations import status
from headrace.core.request import Request, SamplingParams
from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms
from tests.waiting import eventually

PATH = "/v1/completions"


def test_models(house):
    (card,) = house.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fox", "model", 256)
    assert house.client.get("/v1/models/fox").json() == card


@pytest.mark.parametrize("options", [{"stall_seconds": 0.05}])
def test_health_is_progress_not_existence(house):
    for path in ("/health", "/health/ready", "/ping", "/livez", "/healthz", "/readyz"):
        assert house.client.get(path).status_code == 200
    house.runner.gate.clear()
    house.client.portal.call(lambda: house.service.open([Request("r", (70, 71))]) and None)
    time.sleep(0.2)
    answer = house.client.get("/health")
    assert answer.status_code == 503
    assert "no step has progressed" in answer.json()["status"]
    for path in ("/health/ready", "/livez", "/healthz", "/readyz"):
        assert house.client.get(path).status_code == 503
    house.runner.gate.set()


def test_a_draining_server_is_healthy_and_not_ready(house):
    house.service.draining = True
    assert house.client.get("/health").status_code == 200
    answer = house.client.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    refused = house.client.post(PATH, json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


def test_a_request_is_explained(house):
    answer = house.client.post(PATH, json={"prompt": "x", "max_tokens": 2, "metadata": {"a": "b"}}).json()
    reported = house.client.get(f"/v1/requests/{answer['id']}").json()
    assert reported["state"] == "finished"
    assert reported["output_tokens"] == 2
    assert reported["metadata"] == {"a": "b"}
    assert reported["finish"]["reason"] == "length"


def test_a_call_with_several_answers_is_explained_by_each(house):
    answer = house.client.post(PATH, json={"prompt": "x", "max_tokens": 2, "n": 2}).json()
    reported = house.client.get(f"/v1/requests/{answer['id']}").json()
    assert [each["id"] for each in reported["sequences"]] == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert house.client.get("/v1/requests/cmpl-other").status_code == 404


def test_info_counts_and_shows_what_it_was_given(house):
    info = house.client.get("/server_info").json()
    assert info["device"] == "none"
    assert info["open_requests"] == info["queued_requests"] == 0
    assert info["draining"] is False


def test_metrics_are_passed_on(house):
    house.client.post(PATH, json={"prompt": "x", "max_tokens": 2})
    page = house.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "headrace:generation_tokens_total" in page.text


def test_the_prefix_cache_can_be_emptied(house):
    def cached():
        answer = house.client.post(PATH, json={"prompt": [70] * 32, "max_tokens": 1}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 31)
    assert house.client.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_an_id_used_again_is_explained_anew(house):
    body = {"prompt": "x", "max_tokens": 2, "request_id": "mine"}
    house.client.post(PATH, json=body | {"n": 2, "metadata": {"a": "b"}})
    house.client.post(PATH, json=body)
    reported = house.client.get("/v1/requests/cmpl-mine").json()
    assert (reported["id"], reported["metadata"]) == ("cmpl-mine", {})


def two_for_one_slot(house) -> None:
    """The second of two requests waits, and the book knows."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for name in ("first", "second"):
        request = Request(name, (70, 71), params)
        house.client.portal.call(lambda request=request: house.service.open([request]) and None)
    eventually(lambda: house.client.get("/v1/requests/second").status_code == 200)


FORESEEN = {"position": 7, "predicted_start_seconds": 1.5}
SLOW = {"max_num_seqs": 1, "step_seconds": 0.05, "predict_start": lambda request_id, now: FORESEEN}


@pytest.mark.parametrize("options", [SLOW])
def test_what_only_the_engine_knows_of_a_waiting_request_is_asked_of_it(house, monkeypatch):
    monkeypatch.setattr(status, "PREDICT_SECONDS", 60.0)
    two_for_one_slot(house)
    reported = house.client.get("/v1/requests/second").json()
    assert reported["state"] == "waiting"
    assert reported | FORESEEN == reported
    assert "predicted_start_seconds" not in house.client.get("/v1/requests/first").json()


@pytest.mark.parametrize("options", [SLOW])
def test_an_engine_that_hangs_in_a_step_keeps_no_explanation_back(house, monkeypatch):
    two_for_one_slot(house)
    monkeypatch.setattr(status, "PREDICT_SECONDS", 0.05)
    house.runner.gate.clear()
    eventually(lambda: "predicted_start_seconds" not in house.client.get("/v1/requests/second").json())
    assert house.client.get("/v1/requests/second").json()["position"] == 0


def test_a_paused_server_rejects_new_requests_until_it_is_resumed(house):
    assert house.client.post("/pause").json() == {"paused": True, "open_requests": 0}
    rejected = house.client.post(PATH, json={"prompt": "x", "max_tokens": 1})
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "paused")
    assert int(rejected.headers["retry-after"]) >= 1
    ready = house.client.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "paused")
    assert house.client.get("/health").status_code == 200
    assert house.client.post("/resume").json()["paused"] is False
    assert house.client.post(PATH, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert house.client.get("/health/ready").status_code == 200


def test_a_request_that_runs_finishes_during_the_pause(house):
    house.runner.gate.clear()
    answers = []
    body = {"prompt": "x", "max_tokens": 3}
    running = threading.Thread(target=lambda: answers.append(house.client.post(PATH, json=body)))
    running.start()
    while not house.service.open_requests():
        pass
    assert house.client.post("/pause").json() == {"paused": True, "open_requests": 1}
    house.runner.gate.set()
    running.join(60)
    assert answers[0].status_code == 200


BODY = {"prompt": "abc", "max_tokens": 5}
RULES = Rules(tenants=Tenants({"acme": TenantTerms(limits=TenantLimits(requests_per_minute=1))}))


@pytest.mark.parametrize("options", [{"rules": RULES}])
def test_usage_is_reported_by_tenant(house):
    for tenant in ("acme", "acme", "else"):
        house.client.post(PATH, json=BODY, headers={"X-Tenant-Id": tenant})
    house.quiet()
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
    house.quiet()
    alpha = {"Authorization": "Bearer alpha"}
    for query in ("", "?tenant=acme"):
        (reported,) = house.client.get("/v1/usage" + query, headers=alpha).json()["data"]
        assert (reported["tenant"], reported["requests"]) == (keys.identify("Bearer alpha").name, 1)
    assert house.client.get("/v1/usage").status_code == 401
