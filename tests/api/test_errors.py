import json

import pytest
from starlette.testclient import TestClient

from headrace.api import errors
from headrace.core.events import Finished
from headrace.core.ports import LOST_PREFIX
from headrace.core.request import FinishReason, RejectReason
from headrace.core.tenancy.gate import Reject
from tests.api.conftest import build_house


def test_every_error_has_openais_shape():
    made = [
        errors.invalid("m", "p"),
        errors.not_supported("tools"),
        errors.context_length_exceeded(5, 6, 10, "max_tokens"),
        errors.invalid_api_key(),
        errors.model_not_found("x"),
        errors.too_large(5),
        errors.timed_out(1.5),
        errors.turned_away(Reject(RejectReason.QUEUE_FULL, "full", 7), {}),
        errors.turned_away(Reject(RejectReason.TENANT_LIMIT, "enough", 7), {}),
        errors.turned_away(Reject(RejectReason.TOO_LARGE, "never", 0), {}),
        errors.deadline_unreachable("too late"),
        errors.shutting_down(),
        errors.failed(),
    ]
    for error in made:
        response = error.response()
        body = json.loads(response.body)["error"]
        assert set(body) == {"message", "type", "param", "code"}
        assert body["code"]
        assert ("retry-after" in response.headers) == (response.status_code in (429, 503))


def test_a_tenants_limit_is_a_429_with_its_headers():
    error = errors.turned_away(
        Reject(RejectReason.TENANT_LIMIT, "enough", 7), {"x-ratelimit-remaining-requests": "0"}
    )
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.headers == {"x-ratelimit-remaining-requests": "0", "Retry-After": "7"}


def test_a_passed_deadline_and_an_unreachable_one_have_different_errors():
    passed = errors.of_finish(Finished("r", FinishReason.TIMEOUT, 1, 0, 0), 3.0)
    hopeless = errors.of_finish(Finished("r", FinishReason.UNREACHABLE, 1, 0, 0, "predicted 9 s"), 3.0)
    assert (passed.status, passed.code) == (408, "deadline_exceeded")
    assert (hopeless.status, hopeless.code) == (408, "deadline_unreachable")
    assert "predicted 9 s" in str(hopeless)


def test_a_lost_part_of_the_model_may_be_asked_again_later():
    lost = Finished("r", FinishReason.FAILED, 1, 0, 0, f"{LOST_PREFIX}rank 1 ended with exit code -9")
    error = errors.of_finish(lost, 3.0)
    assert (error.status, error.code, error.headers) == (503, "model_restarting", {"Retry-After": "10"})
    assert "rank 1" not in str(error)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_each_end_is_an_answer_or_an_error(reason):
    error = errors.of_finish(Finished("r", reason, 1, 0, 0, "the inside"), 3.0)
    status = None if error is None else error.status
    assert (
        status
        == {
            FinishReason.STOP: None,
            FinishReason.LENGTH: None,
            FinishReason.TIMEOUT: 408,
            FinishReason.UNREACHABLE: 408,
            FinishReason.REJECTED: 400,
            FinishReason.CANCELLED: 503,
            FinishReason.FAILED: 500,
        }[reason]
    )
    reported = (FinishReason.REJECTED, FinishReason.UNREACHABLE)  # their messages are written for the caller
    assert error is None or reason in reported or "inside" not in str(error)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/audio/speech", "Audio"),
        ("/v1/audio/transcriptions", "Audio"),
        ("/v1/images/generations", "Image generation"),
        ("/v1/realtime", "The Realtime API"),
        ("/v1/moderations", "Moderation"),
    ],
)
def test_a_route_that_is_known_elsewhere_is_refused_by_name(house, path, what):
    answer = house.client.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_route")
    assert error["message"] == f"{what} is not supported: this server has no route {path!r}."


def test_a_batch_of_messages_is_refused_in_the_form_of_its_api(house):
    answer = house.client.post("/v1/messages/batches", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert "use /v1/batches" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_1/cancel"])
def test_a_route_that_an_option_adds_names_the_option(house, path):
    answer = house.client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unsupported_route")
    assert "start the server with --batch-path" in answer.json()["error"]["message"]


def test_a_route_that_only_begins_like_one_is_not_found(house):
    assert house.client.post("/v1/embeddingss").json()["error"]["code"] == "route_not_found"


@pytest.mark.parametrize("path", ["/v1/files/a%2Fb", "/v1/files/a%2Fb/content", "/v1/batches/a%2Fb"])
def test_a_path_below_an_optional_route_that_the_server_has_is_not_found(tmp_path, path):
    _, app = build_house({"batch_path": tmp_path})
    with TestClient(app) as client:
        answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
