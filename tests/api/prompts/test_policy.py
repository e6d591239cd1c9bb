from headrace.api.compile.markers import chosen
from headrace.api.compile.policies import (
    SESSION_RETENTION,
    STORED_RETENTION,
    About,
    PromptPolicy,
    session_of,
    session_of_stored,
    stored_name,
)
from headrace.core.request import Request, Retention
from headrace.core.tenancy.tenants import Tenants, TenantTerms
from headrace.service.sessions import Turn


class Reported:
    """Takes the requests of sessions."""

    def __init__(self):
        self.turns = []

    def enter(self, request, turn):
        self.turns.append((request.id, turn))


def test_a_tenants_own_markers_replace_the_servers():
    policy = PromptPolicy(chosen(["billing_header"]))
    tenants = Tenants(
        {"own": TenantTerms(normalize=frozenset({"git_status"})), "none": TenantTerms(normalize=frozenset())}
    )
    assert policy.markers(tenants, "other") == chosen(["billing_header"])
    assert policy.markers(tenants, "own") == chosen(["git_status"])
    assert policy.markers(tenants, "none") == ()


def test_a_session_retains_its_prompt_for_a_while():
    assert session_of(None, None, releases=False) is None
    assert session_of("", 5.0, releases=True) is None
    reported = session_of("s", None, releases=False)
    assert reported == (Turn("s"), Retention(0, None, SESSION_RETENTION, 300.0))
    reported = session_of("s", 7.0, releases=True)
    assert reported == (Turn("s", releases=True), Retention(0, None, SESSION_RETENTION, 7.0))


def test_a_stored_response_continues_the_session_of_the_previous_one():
    reported = session_of_stored("resp_2", "resp_1", 60.0)
    assert reported.turn == Turn(stored_name("resp_2"), stored_name("resp_1"))
    assert reported.retention == Retention(0, None, STORED_RETENTION, 60.0)
    assert session_of_stored("resp_1", None, 60.0).turn.continues == ""


def test_a_request_is_entered_if_there_is_a_listener():
    request, sessions, seen = Request("r", (1, 2)), Reported(), []
    PromptPolicy().submit(request, About(), session_of("s", None, releases=False))
    policy = PromptPolicy(enter=lambda *given: seen.append(given), sessions=sessions)
    about = About(tools=(5,), normalized=({"marker": "m"},))
    policy.submit(request, about, session_of("s", None, releases=False))
    policy.submit(request, about, None)
    assert sessions.turns == [("r", Turn("s"))]
    assert seen == 2 * [(request, about.place, (5,), ({"marker": "m"},))]
