"""Every malformed request is refused with its own status, type, param and code, and disturbs nobody."""

import json

import httpx
import pytest

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
HI = '"messages": [{"role": "user", "content": "hi"}]'


def chat(fields: str) -> tuple[str, bytes]:
    return CHAT, f"{{{HI}, {fields}}}".encode()


def text(fields: str) -> tuple[str, bytes]:
    return TEXT, f'{{"prompt": "hi", {fields}}}'.encode()


def messages(value: str) -> tuple[str, bytes]:
    return CHAT, f'{{"messages": {value}}}'.encode()


def prompt(value: str) -> tuple[str, bytes]:
    return TEXT, f'{{"prompt": {value}}}'.encode()


REFUSED = [
    # not JSON, or not an object
    ((CHAT, b""), None, "invalid_json"),
    ((CHAT, b"not json"), None, "invalid_json"),
    ((CHAT, b"[]"), None, "invalid_json"),
    ((TEXT, b'{"prompt": "\xff\xfe"}'), None, "invalid_json"),
    ((TEXT, b'{"prompt": "\\ud800"}'), None, "invalid_json"),
    ((TEXT, b"[" * 50_000), None, "invalid_json"),
    (chat('"temperature": NaN'), None, "invalid_json"),
    (chat('"temperature": -Infinity'), None, "invalid_json"),
    # wrong types
    (chat('"temperature": "1"'), "temperature", "invalid_type"),
    (chat('"temperature": true'), "temperature", "invalid_type"),
    (chat('"max_tokens": "5"'), "max_tokens", "invalid_type"),
    (chat('"max_tokens": 5.0'), "max_tokens", "invalid_type"),
    (chat('"n": true'), "n", "invalid_type"),
    (chat('"stream": "yes"'), "stream", "invalid_type"),
    (chat('"stop": 5'), "stop", "invalid_type"),
    (chat('"stop": ["a", null]'), "stop", "invalid_type"),
    (chat('"logprobs": 3'), "logprobs", "invalid_type"),
    (text('"logprobs": true'), "logprobs", "invalid_type"),
    (chat('"model": 5'), "model", "invalid_type"),
    (chat('"logit_bias": [1]'), "logit_bias", "invalid_type"),
    (chat('"stop_token_ids": ["1"]'), "stop_token_ids[0]", "invalid_type"),
    (chat('"metadata": {"a": 1}'), "metadata", "invalid_type"),
    (chat('"chat_template_kwargs": []'), "chat_template_kwargs", "invalid_type"),
    # values out of range
    (chat('"temperature": -1'), "temperature", "invalid_value"),
    (chat('"temperature": 1e999'), "temperature", "invalid_value"),
    (chat('"top_p": 0'), "top_p", "invalid_value"),
    (chat('"top_p": 1.1'), "top_p", "invalid_value"),
    (chat('"top_k": -2'), "top_k", "invalid_value"),
    (chat('"min_p": 2'), "min_p", "invalid_value"),
    (chat('"n": 0'), "n", "invalid_value"),
    (chat('"n": 1000'), "n", "invalid_value"),
    (chat('"max_tokens": 0'), "max_tokens", "invalid_value"),
    (chat('"max_tokens": -2'), "max_tokens", "invalid_value"),
    (chat('"max_completion_tokens": -2'), "max_completion_tokens", "invalid_value"),
    (chat('"max_tokens": 4, "max_completion_tokens": 5'), "max_completion_tokens", "invalid_value"),
    (chat('"max_tokens": 2, "min_tokens": 3'), "min_tokens", "invalid_value"),
    (chat('"presence_penalty": 3'), "presence_penalty", "invalid_value"),
    (chat('"repetition_penalty": 0'), "repetition_penalty", "invalid_value"),
    (chat('"seed": 99999999999999999999'), "seed", "invalid_value"),
    (chat('"stop": ""'), "stop", "invalid_value"),
    (chat('"logit_bias": {"5": 101}'), "logit_bias", "invalid_value"),
    (chat('"logit_bias": {"cat": 1}'), "logit_bias", "invalid_value"),
    (chat('"logit_bias": {"99999999": 1}'), "logit_bias", "invalid_value"),
    (chat('"allowed_token_ids": []'), "allowed_token_ids", "invalid_value"),
    (chat('"allowed_token_ids": [99999999]'), "allowed_token_ids", "invalid_value"),
    (chat('"stop_token_ids": [-1]'), "stop_token_ids[0]", "invalid_value"),
    (chat('"bad_words": [""]'), "bad_words", "invalid_value"),
    (chat('"truncate_prompt_tokens": 0'), "truncate_prompt_tokens", "invalid_value"),
    (chat('"request_id": "a b"'), "request_id", "invalid_value"),
    (chat('"service_tier": "gold"'), "service_tier", "invalid_value"),
    (chat('"slo": {"ttft_ms": 0}'), "slo.ttft_ms", "invalid_value"),
    (chat('"slo": {"itl_ms": 5}'), "slo.itl_ms", "unknown_parameter"),
    (chat('"deadline_ms": 0'), "deadline_ms", "invalid_value"),
    (chat('"deadline_ms": 86400000'), "deadline_ms", "invalid_value"),
    (chat('"retention": [{"priority": 101}]'), "retention[0].priority", "invalid_value"),
    (chat('"retention": [{"start": 5, "end": 5, "priority": 1}]'), "retention[0].end", "invalid_value"),
    (chat('"retention": [{"start": 9999, "priority": 1}]'), "retention[0].start", "invalid_value"),
    (chat('"logprobs": true, "top_logprobs": 21'), "top_logprobs", "invalid_value"),
    (chat('"top_logprobs": 2'), "top_logprobs", "invalid_value"),
    (chat('"stream_options": {"include_usage": true}'), "stream_options", "invalid_value"),
    (chat('"stream": true, "prompt_logprobs": 1'), "prompt_logprobs", "invalid_value"),
    (text('"n": 3, "best_of": 2'), "best_of", "invalid_value"),
    (text('"best_of": 2, "stream": true'), "best_of", "invalid_value"),
    (text('"logprobs": 1, "echo": true, "stream": true'), "echo", "invalid_value"),
    # prompts and messages
    ((TEXT, b"{}"), "prompt", "missing_required_parameter"),
    (prompt('""'), "prompt", "invalid_value"),
    (prompt("[]"), "prompt", "invalid_value"),
    (prompt('[""]'), "prompt", "invalid_value"),
    (prompt("[[]]"), "prompt", "invalid_value"),
    (prompt("null"), "prompt", "invalid_type"),
    (prompt("5"), "prompt", "invalid_type"),
    (prompt('[1, "a"]'), "prompt", "invalid_type"),
    (prompt("[true]"), "prompt", "invalid_type"),
    (prompt("[1.5]"), "prompt", "invalid_type"),
    (prompt("[-1]"), "prompt", "invalid_value"),
    (prompt("[99999999]"), "prompt", "invalid_value"),
    (prompt(json.dumps([1] * 9000)), None, "context_length_exceeded"),
    ((CHAT, b"{}"), "messages", "missing_required_parameter"),
    (messages("[]"), "messages", "invalid_value"),
    (messages("null"), "messages", "invalid_type"),
    (messages('"hi"'), "messages", "invalid_type"),
    (messages('["hi"]'), "messages[0]", "invalid_type"),
    (messages('[{"content": "hi"}]'), "messages[0].role", "missing_required_parameter"),
    (messages('[{"role": "user"}]'), "messages[0].content", "missing_required_parameter"),
    (messages('[{"role": "user", "content": 5}]'), "messages[0].content", "invalid_type"),
    (messages('[{"role": "boss", "content": "hi"}]'), "messages[0].role", "invalid_value"),
    (messages('[{"role": "user", "content": "hi", "mood": 1}]'), "messages[0].mood", "unknown_parameter"),
    (messages('[{"role": "user", "content": [{"type": "text"}]}]'), "messages[0].content[0].text", None),
    (chat('"max_tokens": 100000'), "max_tokens", "context_length_exceeded"),
    # unknown and not supported
    (chat('"temprature": 1'), "temprature", "unknown_parameter"),
    (text('"messages": []'), "messages", "unknown_parameter"),
    (text('"echo_twice": true'), "echo_twice", "unknown_parameter"),
    (chat('"stream": true, "stream_options": {"x": 1}'), "stream_options.x", "unknown_parameter"),
    (chat('"functions": [{"name": "f"}]'), "functions", "unsupported_parameter"),
    (chat('"tools": [{"type": "function"}]'), "tools[0].function", "missing_required_parameter"),
    (
        chat('"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template": "x"'),
        "tools",
        "unsupported_parameter",
    ),
    (
        chat('"tools": [{"type": "function", "function": {"name": "f."}}]'),
        "tools[0].function.name",
        "invalid_value",
    ),
    (chat('"tool_choice": "required"'), "tool_choice", "invalid_value"),
    (chat('"prediction": {"type": "content"}'), "prediction.content", "missing_required_parameter"),
    (chat('"prediction": {"type": "text", "content": "x"}'), "prediction.type", "invalid_value"),
    (chat('"prediction": {"type": "content", "content": 5}'), "prediction.content", None),
    (chat('"prediction": "x"'), "prediction", None),
    (chat('"reasoning_effort": "high"'), "reasoning_effort", "unsupported_parameter"),
    (chat('"store": true'), "store", "unsupported_parameter"),
    (text('"suffix": "x"'), "suffix", "unsupported_parameter"),
    (text('"logits_processors": ["x"]'), "logits_processors", "unsupported_parameter"),
    (messages('[{"role": "function", "content": "x"}]'), "messages[0].role", "unsupported_parameter"),
    (
        messages('[{"role": "tool", "content": "x"}]'),
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
    (
        messages('[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]'),
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    # templates
    (chat('"chat_template": "{% for %}"'), "chat_template", "template_error"),
    (chat('"chat_template": "{{ messages[9].content.x.y }}"'), "chat_template", "template_error"),
    (chat('"chat_template": "{{ raise_exception(1/0) }}"'), "chat_template", "template_error"),
    (
        chat(
            '"chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"'
        ),
        "chat_template",
        "template_error",
    ),
    (chat('"chat_template_kwargs": {"messages": []}'), "chat_template_kwargs", "invalid_value"),
    (chat('"chat_template_kwargs": {"tools": []}'), "chat_template_kwargs", "invalid_value"),
    (chat('"chat_template_kwargs": {"documents": []}'), "chat_template_kwargs", "unsupported_parameter"),
    (chat('"continue_final_message": true, "add_generation_prompt": true'), "continue_final_message", None),
    (chat('"continue_final_message": "x"'), "continue_final_message", "invalid_type"),
    # beside the two
    ((TOKENIZE, b'{"prompt": 5}'), "prompt", "invalid_type"),
    ((TOKENIZE, b"{}"), "prompt", "missing_required_parameter"),
    ((TOKENIZE, b'{"messages": []}'), "messages", "invalid_value"),
    ((DETOKENIZE, b'{"tokens": ["1"]}'), "tokens[0]", "invalid_type"),
    ((DETOKENIZE, b'{"tokens": [99999999]}'), "tokens", "invalid_value"),
]


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    ("sent", "param", "code"),
    REFUSED,
    ids=[f"{path.rsplit('/')[-1]}-{raw[:70]!r}" for (path, raw), _, _ in REFUSED],
)
def test_it_is_refused_by_name(client, sent, param, code):
    path, raw = sent
    answer = client.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert error["message"]
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "route_not_found"),
        ("GET", "/v1/chat/completions/", 404, "route_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
        ("GET", "/v1/requests/cmpl-nobody", 404, "request_not_found"),
    ],
)
def test_what_is_not_there_is_refused_in_the_same_shape(client, method, path, status, code):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


def test_an_unknown_model_is_not_found(client):
    for path, body in ((CHAT, f'{{{HI}, "model": "gpt-5"}}'), (TEXT, '{"prompt": "x", "model": "gpt-5"}')):
        answer = client.post(path, content=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"


def test_the_context_length_error_has_numbers(client):
    limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
    error = client.post(TEXT, json={"prompt": [1] * 10, "max_tokens": limit}).json()["error"]
    assert str(limit) in error["message"]
    assert str(limit + 10) in error["message"]


def test_a_body_in_chunks_is_counted_too(client):
    def chunks():
        for _ in range(100):
            yield b"x" * 100_000

    answer = client.post(TEXT, content=chunks())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_none_of_it_disturbed_anybody(client):
    answer = client.post(TEXT, json={"prompt": "Once", "max_tokens": 4})
    assert answer.status_code == 200
    info = client.get("/server_info").json()
    assert info["open_requests"] == info["queued_requests"] == 0
    assert client.get("/health").status_code == 200
