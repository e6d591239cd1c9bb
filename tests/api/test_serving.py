"""A call is found by its own id and by the client's request id, within its tenant."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.api import serving
from headrace.api.serving import CallNotes

PATH = "/v1/completions"


BODY = {"prompt": "x", "max_tokens": 2}


def named(notes: CallNotes, request_id: str, tenant: str, call_id: str) -> None:
    notes.name(SimpleNamespace(request_id=request_id, tenant=tenant, call_id=call_id))


def test_the_newest_call_of_a_name_is_found_within_its_tenant() -> None:
    notes = CallNotes()
    named(notes, "mine", "a", "call-1")
    named(notes, "mine", "a", "call-2")
    named(notes, "mine", "b", "call-3")
    assert notes.find("mine", "a") == "call-2"
    assert notes.find("mine", "b") == "call-3"
    assert notes.find("mine", None) == "call-3"
    assert notes.find("mine", "c") == "mine"
    assert notes.find("call-1", "a") == "call-1"


def test_old_names_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(serving, "MOST_NAMES", 6)
    notes = CallNotes()
    for number in range(5):
        named(notes, f"n{number}", "a", f"call-{number}")
    assert notes.find("n1", "a") == "n1"
    assert notes.find("n2", "a") == "call-2"


def test_tenants_that_choose_the_same_name_are_forgotten_too(monkeypatch) -> None:
    monkeypatch.setattr(serving, "MOST_NAMES", 6)
    notes = CallNotes()
    for number in range(9):
        named(notes, "same", f"tenant-{number}", f"call-{number}")
    known = [number for number in range(9) if notes.find("same", f"tenant-{number}") == f"call-{number}"]
    assert known == [4, 5, 6, 7, 8]
    assert notes.find("same", None) == "call-8"


def test_a_request_is_explained_by_the_id_that_its_client_chose(house) -> None:
    answer = house.client.post(PATH, json=BODY, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    shown = house.client.get("/v1/requests/mine").json()
    assert (shown["id"], shown["state"]) == (answer.json()["id"], "finished")


def test_a_request_is_explained_by_the_id_that_the_server_chose(house) -> None:
    answer = house.client.post(PATH, json=BODY)
    shown = house.client.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    assert shown["id"] == answer.json()["id"]


def test_a_rejected_request_is_found_too(house) -> None:
    house.service.draining = True
    assert house.client.post(PATH, json=BODY, headers={"X-Request-Id": "mine"}).status_code == 503
    shown = house.client.get("/v1/requests/mine").json()
    assert shown["finish"]["reason"] == "rejected"


@pytest.mark.parametrize("options", [{"keys": ("alpha", "beta")}])
def test_two_tenants_may_choose_the_same_id(house) -> None:
    ids = {}
    for key in ("alpha", "beta"):
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "mine"}
        ids[key] = house.client.post(PATH, json=BODY, headers=headers).json()["id"]
    for key in ("alpha", "beta"):
        headers = {"Authorization": f"Bearer {key}"}
        assert house.client.get("/v1/requests/mine", headers=headers).json()["id"] == ids[key]
    other = house.client.get(f"/v1/requests/{ids['alpha']}", headers={"Authorization": "Bearer beta"})
    assert other.status_code == 404


def test_a_call_with_several_choices_is_found_whole(house) -> None:
    house.client.post(PATH, json=BODY | {"n": 2}, headers={"X-Request-Id": "mine"})
    assert len(house.client.get("/v1/requests/mine").json()["sequences"]) == 2
