import threading
import time

import pytest

from tests.api.caching import with_memory

PATH = "/v1/completions"


def abort(house, request_id, **headers):
    return house.client.post("/abort_request", json={"request_id": request_id}, headers=headers)


def aborted_soon(house, request_id, **headers):
    """Abort a request as soon as it is there."""

    def work():
        until = time.monotonic() + 60
        while abort(house, request_id, **headers).status_code != 200 and time.monotonic() < until:
            time.sleep(0.005)
        house.runner.gate.set()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_says_so(house, stream):
    house.runner.gate.clear()
    thread = aborted_soon(house, "cmpl-mine")
    answer = house.client.post(
        PATH, json={"prompt": "x", "request_id": "mine", "stream": stream, "max_tokens": 50}
    )
    thread.join()
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "request_aborted"
    while house.service.open_requests():
        time.sleep(0.005)
    assert abort(house, "cmpl-mine").json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("options", [{"lookup": with_memory}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_coalesced_request_can_be_aborted_alone(house, stream):
    house.runner.gate.clear()
    shared = {"prompt": "x", "temperature": 0, "max_tokens": 50, "stream": stream}
    reported = []
    leader = threading.Thread(target=lambda: reported.append(house.client.post(PATH, json=shared)))
    leader.start()
    while not house.service.open_requests():
        time.sleep(0.005)
    thread = aborted_soon(house, "cmpl-mine")
    answer = house.client.post(PATH, json=shared | {"request_id": "mine"})
    thread.join()
    leader.join()
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "request_aborted"
    assert reported[0].status_code == 200


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}])
def test_only_the_key_that_made_a_request_ends_it(house):
    mine, other = {"Authorization": "Bearer alpha"}, {"Authorization": "Bearer beta"}
    house.runner.gate.clear()
    refused = []

    def work():
        until = time.monotonic() + 60
        while time.monotonic() < until and not house.service.open_requests():
            time.sleep(0.005)
        refused.append(abort(house, "cmpl-mine", **other).status_code)
        refused.append(abort(house, "cmpl-mine", **mine).status_code)
        house.runner.gate.set()

    thread = threading.Thread(target=work)
    thread.start()
    answer = house.client.post(
        PATH, json={"prompt": "x", "request_id": "mine", "max_tokens": 50}, headers=mine
    )
    thread.join()
    assert refused == [404, 200]
    assert answer.status_code == 409


def test_what_is_no_request_cannot_be_ended(house):
    assert abort(house, "cmpl-none").status_code == 404
    assert abort(house, "").status_code == 400
