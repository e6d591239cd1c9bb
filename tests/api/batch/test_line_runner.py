"""Lines on the endpoints of a server over a scripted runner."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from headrace.api.auth.api_keys import Grant, Role
from headrace.api.batch.line_runner import OPENED, LineRunner, MessagesLines, ResponsesLines
from headrace.api.batch.lines import ENDPOINTS, BatchRequest
from headrace.api.embedding.calls import PoolingCalls
from headrace.core.events import Arrived
from headrace.observe.cost.prices import Pricing, TokenPrices
from headrace.service.embedding_models import PoolingModels
from tests.doubles.pooling_models import LetterModel, LetterPairs


@pytest.fixture
def pricing():
    return Pricing()


@pytest.fixture
def options(tmp_path, pricing):
    return {"batch_path": tmp_path, "max_num_seqs": 2, "pricing": pricing}


def test_every_endpoint_of_batches_can_be_run():
    calls = PoolingCalls(None, PoolingModels(LetterModel()), time.monotonic)
    others = {*ResponsesLines.paths, *MessagesLines.paths}
    assert {*OPENED, *calls.open, *others} == set(ENDPOINTS)
    assert calls.paths == tuple(calls.open)


def begin(house, bodies, url="/v1/completions"):
    lines = [
        {"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)
    ]
    raw = "".join(json.dumps(line) + "\n" for line in lines)
    form = {"files": {"file": ("a", raw)}, "data": {"purpose": "batch"}}
    file = house.client.post("/v1/files", **form).json()
    body = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    return house.client.post("/v1/batches", json=body).json()["id"]


def ended(house, id):
    until = time.monotonic() + 60
    while (batch := house.client.get(f"/v1/batches/{id}").json())["status"] != "completed":
        assert time.monotonic() < until, json.dumps(batch)  # whole, as it is
        time.sleep(0.01)
    return batch


def results(house, batch):
    found = {}
    for id in (batch["output_file_id"], batch["error_file_id"]):
        if id:
            rows = map(json.loads, house.client.get(f"/v1/files/{id}/content").text.splitlines())
            found |= {row["custom_id"]: row["response"] for row in rows}
    return found


def test_a_line_is_answered_as_a_request_is(house):
    body = {"prompt": "a fox", "temperature": 0, "max_tokens": 9}
    batch = ended(house, begin(house, [body]))
    (line,) = results(house, batch).values()
    request = house.client.post("/v1/completions", json=body).json()
    changing = {"id": 0, "created": 0}
    assert line["body"] | changing == request | changing | {"usage": line["body"]["usage"]}
    assert line["status_code"] == 200


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/responses", {"input": "a fox", "temperature": 0, "max_output_tokens": 9}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a fox"}], "temperature": 0, "max_tokens": 9},
        ),
    ],
)
def test_lines_of_the_other_dialects_are_answered_as_requests_are(house, url, body):
    batch = ended(house, begin(house, [body, body | {"top_p": 3}, body | {"zzz": 1}], url))
    line, wrong, unknown = results(house, batch).values()
    request = house.client.post(url, json=body).json()
    assert line["status_code"] == 200
    assert text_of(line["body"]) == text_of(request) != ""
    assert line["body"]["id"][:4] == request["id"][:4]
    assert (wrong["status_code"], wrong["body"]["error"]["param"]) == (400, "top_p")
    assert (unknown["status_code"], unknown["body"]["error"]["param"]) == (400, "zzz")
    assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == tokens_of(request)


def text_of(answer):
    content = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return content[0]["text"]


def tokens_of(answer):
    usage = answer["usage"]
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]


def test_a_line_of_responses_is_stored_and_may_be_continued(house):
    batch = ended(house, begin(house, [{"input": "a fox", "max_output_tokens": 9}], "/v1/responses"))
    (line,) = results(house, batch).values()
    id = line["body"]["id"]
    assert house.client.get(f"/v1/responses/{id}").json() == line["body"]
    more = {"input": "More.", "previous_response_id": id, "max_output_tokens": 9, "store": False}
    refused = {"input": "x", "background": True}
    batch = ended(house, begin(house, [more, refused], "/v1/responses"))
    continued, background = results(house, batch).values()
    assert continued["body"]["usage"]["input_tokens"] > line["body"]["usage"]["input_tokens"]
    assert house.client.get(f"/v1/responses/{continued['body']['id']}").status_code == 404
    assert (background["status_code"], background["body"]["error"]["param"]) == (400, "background")


@pytest.mark.parametrize("pricing", [Pricing(tokens=TokenPrices(1e6, 1e6, 1e7))])
def test_a_line_may_ask_for_its_cost(house, pricing):
    asked, silent = ({"prompt": "abc", "max_tokens": 5} | more for more in ({"include_cost": True}, {}))
    found = results(house, ended(house, begin(house, [asked, silent])))
    used = found["0"]["body"]["usage"]
    assert used["cost"] == 3 + 10 * used["completion_tokens"]
    assert "cost" not in found["1"]["body"]["usage"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "a", "model": "cat"}, 404, "model"),
        ({"prompt": "a", "n": 0}, 400, "n"),
        ({"prompt": "a", "unknown": 1}, 400, "unknown"),
        ({"prompt": "a", "top_p": 3}, 400, "top_p"),
        ({"prompt": "x" * 5000}, 400, None),
        ({"prompt": "\ud800"}, 400, None),
        ({"prompt": "a", "temperature": float("nan")}, 400, None),
    ],
)
def test_a_wrong_line_has_the_error_of_a_wrong_request(house, body, status, param):
    (line,) = results(house, ended(house, begin(house, [body]))).values()
    assert (line["status_code"], line["body"]["error"]["param"]) == (status, param)


def test_a_line_brings_no_chat_template(house):
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "x"}
    (line,) = results(house, ended(house, begin(house, [body], "/v1/chat/completions"))).values()
    assert (line["status_code"], line["body"]["error"]["param"]) == (400, "chat_template")


def test_lines_are_background_work_of_the_batchs_tenant(house):
    ended(
        house, begin(house, [{"prompt": "a", "max_tokens": 2, "user": "someone", "service_tier": "priority"}])
    )
    (arrived,) = [event for event in house.counted() if isinstance(event, Arrived)]
    assert (arrived.service_class, arrived.tenant) == ("background", "default")


def test_lines_begin_only_when_no_request_is_open(house):
    service = house.service
    service._urgent += 1  # a request is being answered
    id = begin(house, [{"prompt": "a", "max_tokens": 2}])
    time.sleep(0.5)
    assert not any(isinstance(event, Arrived) for event in house.counted())
    service._urgent -= 1
    ended(house, id)


class Noted:
    """An endpoint that notes each beginning and each end of a line, and lets a request arrive after each."""

    paths = ("/v1/completions",)

    def __init__(self):
        self.service = SimpleNamespace(awaited=False, draining=False)
        self.seen = []
        self.awaited = asyncio.Event()
        self.ready = asyncio.Event()

    def note(self, what):
        assert not self.service.awaited
        self.seen.append(what)
        # Read from its socket in the next iteration of the loop, and known to the service in the one after it.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self.arrive)

    def arrive(self):
        self.service.awaited = True
        self.awaited.set()

    async def open(self, path, raw, caller):
        self.note("begin")
        return self

    async def answer(self, turn):
        await self.ready.wait()  # all lines end at the same time
        async with turn:
            self.note("end")
            return b"{}"

    def close(self):
        pass

    async def answer_requests(self, count):
        before = len(self.seen)
        for number in range(count):
            await self.awaited.wait()
            self.awaited.clear()
            assert len(self.seen) == before + number + 1
            self.service.awaited = False


def test_a_request_that_arrives_during_a_lines_beginning_or_end_goes_before_the_next(monkeypatch):
    monkeypatch.setattr("headrace.api.batch.line_runner.LOOK_SECONDS", 0.001)

    async def run():
        part = Noted()
        runner = LineRunner(part.service, (part,))
        lines = [BatchRequest(n, str(n), "/v1/completions", {}) for n in range(4)]
        running = [asyncio.create_task(runner.run(line, "acme", "background")) for line in lines]
        await part.answer_requests(4)
        part.ready.set()
        await part.answer_requests(4)
        assert [(await task).status for task in running] == [200] * 4
        return part.seen

    assert asyncio.run(run()) == ["begin"] * 4 + ["end"] * 4


def test_a_full_queue_delays_lines_and_fails_none(house, monkeypatch):
    monkeypatch.setattr("headrace.api.batch.runs.FIRST_WAIT_SECONDS", 0.01)
    taken = house.service._queued_requests
    house.service._queued_requests = 10_000
    id = begin(house, [{"prompt": "a", "max_tokens": 2}] * 3)
    time.sleep(0.3)
    house.service._queued_requests = taken
    monkeypatch.setattr("headrace.api.batch.runs.MAX_WAIT_SECONDS", 0.01)
    assert ended(house, id)["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


def test_the_time_limit_of_requests_does_not_count_for_background_lines(house):
    house.service._request_timeout = 0.0
    batch = ended(house, begin(house, [{"prompt": "a", "max_tokens": 4}]))
    assert batch["request_counts"]["completed"] == 1


@pytest.mark.parametrize("grants", [{"acme": Grant("acme"), "root": Grant(None, Role.ADMIN)}])
def test_an_admin_key_acts_for_the_tenant_that_it_names(options, grants, request):
    options["grants"] = grants
    client = request.getfixturevalue("house").client
    tenant, admin = {"Authorization": "Bearer acme"}, {"Authorization": "Bearer root"}
    form = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
    id = client.post("/v1/files", headers=tenant, **form).json()["id"]
    assert client.get(f"/v1/files/{id}", headers=tenant | {"X-Tenant-Id": "globex"}).status_code == 200
    assert client.get(f"/v1/files/{id}", headers=admin).status_code == 404
    assert client.get(f"/v1/files/{id}", headers=admin | {"X-Tenant-Id": "acme"}).status_code == 200


@pytest.fixture
def pooling(options):
    options["embedding_models"] = PoolingModels(LetterModel(), LetterPairs("pairs"))


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/embeddings", {"input": ["ab", "c"], "dimensions": 2}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "a"], "model": "pairs"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "a"]}),
    ],
)
def test_a_line_is_computed_by_an_embedding_model(pooling, house, url, body):
    (line,) = results(house, ended(house, begin(house, [body], url))).values()
    request = house.client.post(url, json=body).json()
    assert line["status_code"] == 200
    assert line["body"] | {"id": 0, "created": 0} == request | {"id": 0, "created": 0}


def test_a_wrong_line_of_embeddings_names_its_field(pooling, house):
    bodies = [
        {"input": ""},
        {"input": "a" * 99},
        {"input": "a", "model": "b"},
        {"input": "a", "dimensions": 999},
    ]
    found = results(house, ended(house, begin(house, bodies, "/v1/embeddings")))
    seen = [(found[str(n)]["status_code"], found[str(n)]["body"]["error"]["param"]) for n in range(4)]
    assert seen == [(400, "input"), (400, "input"), (404, "model"), (400, "dimensions")]
    assert found["1"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("pricing", [Pricing(tokens=TokenPrices(1e6, 1e6, 1e7))])
def test_a_line_of_embeddings_may_ask_for_its_cost(pooling, house, pricing):
    body = {"input": "ab", "include_cost": True}
    (line,) = results(house, ended(house, begin(house, [body], "/v1/embeddings"))).values()
    assert line["body"]["usage"]["cost"] == line["body"]["usage"]["prompt_tokens"] > 0


def test_an_endpoint_without_a_model_is_refused(house):
    file = house.client.post("/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    error = house.client.post("/v1/batches", json=body).json()["error"]
    assert error["param"] == "endpoint"
    assert error["message"].endswith("this server has no model for it")
