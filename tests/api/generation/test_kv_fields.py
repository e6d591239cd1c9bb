"""``kv_transfer_params``: what a proxy sends to a prefill server and then to a decode server."""

from __future__ import annotations

import pytest

from headrace.api.compile.policies import KVSharing
from headrace.core.request import Retention
from tests.api.caching import RequestsNoted

PRODUCER = KVSharing("prefill-0", "10.0.0.5", 5000)
CONSUMER = KVSharing(peers=("10.0.0.5:5000",))
DECODE_THERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's proxies send it."""


@pytest.fixture
def options():
    return {"recall": RequestsNoted}


def ask(house, sharing: KVSharing, params: object, status: int = 200, path: str = "completions", **fields):
    house.model.sharing = sharing
    prompt = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = prompt | {"max_tokens": 1, "kv_transfer_params": params} | fields
    answer = house.client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_answer_of_a_prefill_server_is_the_question_to_a_decode_server(house, path):
    answer = ask(house, PRODUCER, DECODE_THERE, path=path)["kv_transfer_params"]
    assert (answer["remote_host"], answer["remote_port"]) == ("10.0.0.5", 5000)
    assert answer["remote_engine_id"] == "prefill-0"
    assert house.recall.requests[-1].retention == (Retention(0, None, 60, 60.0),), "until it has been pulled"
    assert house.recall.requests[-1].peer == ""
    assert "kv_transfer_params" not in ask(house, CONSUMER, answer, path=path)
    assert house.recall.requests[-1].peer == "10.0.0.5:5000"
    assert not house.recall.requests[-1].follows
    ask(house, CONSUMER, answer | {"remote_prefill_runs": True}, path=path)
    assert house.recall.requests[-1].follows


def test_nothing_is_said_where_nothing_is_asked(house):
    assert "kv_transfer_params" not in ask(house, PRODUCER, None)
    assert "kv_transfer_params" not in ask(house, PRODUCER, {})


@pytest.mark.parametrize(
    ("sharing", "params", "message"),
    [
        (CONSUMER, DECODE_THERE, "publishes no KV blocks"),
        (KVSharing(), DECODE_THERE, "publishes no KV blocks"),
        (PRODUCER, {"do_remote_decode": True, "do_remote_prefill": True}, "exclude each other"),
        (CONSUMER, {"do_remote_prefill": True}, "needs remote_host and remote_port"),
        (
            CONSUMER,
            {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 80},
            "has no peer evil:80",
        ),
        (CONSUMER, {"do_remote_prefill": True, "remote_block_ids": [1]}, "remote_block_ids"),
        (CONSUMER, {"remote_prefill_runs": True}, "remote_prefill_runs needs do_remote_prefill"),
        (CONSUMER, {"do_remote": True}, "do_remote"),
    ],
)
def test_what_is_refused(house, sharing, params, message):
    error = ask(house, sharing, params, status=400)["error"]
    assert message in error["message"]
    assert error["param"].startswith("kv_transfer_params")


def test_a_prompt_for_another_server_is_not_streamed(house):
    assert "cannot be streamed" in str(ask(house, PRODUCER, DECODE_THERE, status=400, stream=True))
