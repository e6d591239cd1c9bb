"""The judge of the API fuzz finds what is wrong: otherwise a run that finds nothing says nothing."""

import httpx
import pytest

from headrace.api.openapi import describe
from tests.judges.api_bodies import Sent
from tests.judges.api_fuzz import names_of, wrong_refusal, wrong_stream

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
GOOD = {
    "message": "Invalid type for 'n'.",
    "type": "invalid_request_error",
    "param": "n",
    "code": "invalid_type",
}


def refusal(error, route=CHAT, status=400, body=None):
    sent = Sent("POST", route, route, body or {"n": "x"}, "application/json")
    known = names_of(DOCUMENT, DOCUMENT["paths"][route]["post"])
    return wrong_refusal(sent, httpx.Response(status, json=error), known)


DOCUMENT = describe("0")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ""),
        ({"param": "messages[0].content"}, ""),
        ({"param": None}, "no field is named"),
        ({"param": "mood"}, "the field 'mood' is not in the request"),
        ({"message": ""}, "a refusal without a message or a code"),
        ({"code": None}, "a refusal without a message or a code"),
        ({"more": 1}, "a refusal that is not in OpenAI's shape"),
    ],
)
def test_a_refusal_of_openais_api(change, found):
    assert refusal({"error": GOOD | change}) == found


def test_a_refusal_of_anthropics_api():
    def reported(message, **more):
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
        return refusal(error | more, MESSAGES)

    assert reported("Invalid type for 'max_tokens'.") == ""
    assert reported("Something is wrong.") == "no field is named"
    assert reported("max_tokens", type="oops") == "a refusal that is not in Anthropic's shape"
    assert refusal({"error": GOOD}, MESSAGES) == "a refusal that is not in Anthropic's shape"


def test_a_stream():
    sent = Sent("POST", CHAT, CHAT)
    assert wrong_stream(sent, "data: {}\n\ndata: [DONE]\n\n") == ""
    assert wrong_stream(sent, "data: {}\n\n") == "a stream that does not end"
    failed = 'data: {"error": {"code": "server_error"}}\n\ndata: [DONE]\n\n'
    assert wrong_stream(sent, failed) == "an error of the server in a stream"
