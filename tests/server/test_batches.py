"""Files and batches, through the official client, on real servers that are also killed."""

import json
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.conftest import serving

CHAT = "/v1/chat/completions"
QUOTAS = ["--batch-file-bytes", "20000", "--batch-tenant-bytes", "50000", "--batch-tenant-files", "20"]
QUOTAS += ["--batch-tenant-batches", "2", "--batch-max-lines", "50"]


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory):
    with serving("--batch-path", str(tmp_path_factory.mktemp("batches")), *QUOTAS) as running:
        yield running


def client_of(server, tenant="alice"):
    headers = {"X-Tenant-Id": tenant}
    return openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, default_headers=headers)


@pytest.fixture
def client(batch_server, request):
    return client_of(batch_server, request.node.name)


def chat_line(name, text="Hello", **body):
    body = {"model": "builtin", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | body
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def long_line(name, text="Hello", tokens=2000):
    return chat_line(name, text, max_tokens=tokens, ignore_eos=True)


def upload(client, lines, name="in.jsonl"):
    raw = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return client.files.create(file=(name, raw), purpose="batch")


def begin(client, lines, **more):
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more)


def ended(client, id, seconds=60.0):
    until = time.monotonic() + seconds
    while (batch := client.batches.retrieve(id)).status not in (
        "completed",
        "failed",
        "cancelled",
        "expired",
    ):
        assert time.monotonic() < until, batch
        time.sleep(0.1)
    return batch


def rows(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []


def test_a_batch_from_upload_to_results(client):
    lines = [chat_line(f"r{n}", f"Say {n}", temperature=0) for n in range(12)]
    lines.append(chat_line("bad", model="another"))
    lines.append(chat_line("worse", temperature=-1))
    file = upload(client, lines, "küche.jsonl")
    assert (file.purpose, file.filename, file.object) == ("batch", "küche.jsonl", "file")
    assert len(client.files.content(file.id).read()) == file.bytes
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "nightly"}
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"job": "nightly"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (14, 12, 2)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    results = {row["custom_id"]: row for row in rows(client, batch.output_file_id)}
    assert results.keys() == {f"r{n}" for n in range(12)}
    answer = results["r3"]["response"]
    assert answer["status_code"] == 200
    assert answer["request_id"].startswith("req_")
    completion = openai.types.chat.ChatCompletion.model_validate(answer["body"])
    assert completion.choices[0].message.content
    assert results["r3"]["error"] is None
    errors = {row["custom_id"]: row for row in rows(client, batch.error_file_id)}
    assert errors["bad"]["response"]["status_code"] == 404
    assert errors["worse"]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.usage.output_tokens == sum(
        r["response"]["body"]["usage"]["completion_tokens"] for r in results.values()
    )
    outputs = list(client.files.list(purpose="batch_output"))
    assert {each.id for each in outputs} == {batch.output_file_id, batch.error_file_id}
    assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_the_guides_example_runs(batch_server, capsys):
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "batches.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(code.replace("http://127.0.0.1:8000", batch_server.url), {})
    out = capsys.readouterr().out
    assert out.startswith("completed ")
    assert out.count("word-") == 20


def test_completions(client):
    lines = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "Once", "max_tokens": n, "ignore_eos": True},
        }
        for n in range(1, 4)
    ]
    file = upload(client, lines)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
    batch = ended(client, batch.id)
    assert batch.expires_at - batch.created_at == 3600
    sizes = {
        r["custom_id"]: r["response"]["body"]["usage"]["completion_tokens"]
        for r in rows(client, batch.output_file_id)
    }
    assert sizes == {"c1": 1, "c2": 2, "c3": 3}


def test_mistakes_in_the_file_fail_the_batch(client):
    batch = ended(client, begin(client, [chat_line("a"), chat_line("a"), {"custom_id": "b"}]).id)
    assert batch.status == "failed"
    assert [(e.code, e.line, e.param) for e in batch.errors.data] == [
        ("duplicate_custom_id", 2, "custom_id"),
        ("invalid_method", 3, "method"),
    ]
    assert batch.output_file_id is None
    too_many = ended(client, begin(client, [chat_line(str(n), max_tokens=1) for n in range(51)]).id)
    assert too_many.errors.data[0].code == "too_many_requests"


def test_a_batch_is_cancelled(client):
    batch = begin(client, [long_line(f"r{n}", f"{n}") for n in range(40)])
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(ended(client, begin(client, [chat_line("a")]).id).id)


def test_tenants_do_not_see_each_other(batch_server, client):
    other = client_of(batch_server, "mallory")
    batch = ended(client, begin(client, [chat_line("a")]).id)
    for call in (
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.output_file_id),
        lambda: other.files.delete(batch.input_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        ),
        lambda: other.files.list(after=batch.input_file_id),
        lambda: other.batches.list(after=batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert not list(other.files.list())
    assert not list(other.batches.list())


def test_quotas(client):
    with pytest.raises(openai.APIStatusError) as error:
        client.files.create(file=("a", b"x" * 20_001), purpose="batch")
    assert (error.value.status_code, error.value.code) == (413, "file_too_large")
    for _ in range(2):
        client.files.create(file=("a", b"x" * 20_000), purpose="batch")
    with pytest.raises(openai.PermissionDeniedError) as error:
        client.files.create(file=("a", b"x" * 10_001), purpose="batch")
    assert error.value.code == "storage_quota_exceeded"
    file = upload(client, [long_line(f"r{n}", f"{n}", 7000) for n in range(20)])
    made = [
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h") for _ in range(2)
    ]
    with pytest.raises(openai.ConflictError) as error:
        client.files.delete(file.id)
    assert error.value.code == "file_in_use"
    with pytest.raises(openai.RateLimitError) as error:
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert error.value.code == "batch_quota_exceeded"
    for batch in made:
        client.batches.cancel(batch.id)
        assert ended(client, batch.id).status == "cancelled"


FORM = {"purpose": "batch"}
FILE = {"file": ("a.jsonl", b"{}")}
EXPIRY = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}


@pytest.mark.parametrize(
    ("form", "files", "param", "code"),
    [
        ({}, FILE, "purpose", "missing_required_parameter"),
        (FORM, {"x": ("a", b"")}, "x", "unknown_parameter"),
        ({"purpose": "fine-tune"}, FILE, "purpose", "unsupported_parameter"),
        ({"purpose": "other"}, FILE, "purpose", "invalid_value"),
        (FORM | {"colour": "red"}, FILE, "colour", "unknown_parameter"),
        (
            FORM | {"expires_after[anchor]": "created_at"},
            FILE,
            "expires_after[seconds]",
            "missing_required_parameter",
        ),
        (FORM | EXPIRY | {"expires_after[anchor]": "now"}, FILE, "expires_after[anchor]", "invalid_value"),
        (FORM | EXPIRY | {"expires_after[seconds]": "10"}, FILE, "expires_after[seconds]", "invalid_value"),
        (FORM | EXPIRY | {"expires_after[seconds]": "x"}, FILE, "expires_after[seconds]", "invalid_value"),
        (FORM | {"purpose": "b" * 600}, FILE, "purpose", "invalid_value"),
        ({"purpose": ["batch", "batch"]}, FILE, "purpose", "invalid_value"),
    ],
)
def test_bad_forms_are_named(batch_server, form, files, param, code):
    answer = httpx.post(batch_server.url + "/v1/files", data=form, files=files, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


@pytest.mark.parametrize(
    ("body", "content_type", "code"),
    [
        (b"{}", "application/json", "invalid_form"),
        (b"nothing", "multipart/form-data; boundary=x", "invalid_form"),
        (b"--x\r\nA: b\r\n\r\n", "multipart/form-data; boundary=x", "invalid_form"),
        (b"--x--", "multipart/form-data; boundary=x", "missing_required_parameter"),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n1\r\n--x--',
            "multipart/form-data; boundary=x",
            "invalid_value",
        ),
    ],
)
def test_what_is_no_form_is_refused(batch_server, body, content_type, code):
    headers = {"Content-Type": content_type}
    answer = httpx.post(batch_server.url + "/v1/files", content=body, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


GOOD = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input_file_id": None}, 400, "input_file_id"),
        ({}, 404, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": 7}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "30d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            400,
            "output_expires_after.seconds",
        ),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, 400, "output_expires_after.anchor"),
        ({"priority": 1}, 400, "priority"),
    ],
)
def test_bad_batches_are_named(batch_server, changes, status, param):
    answer = batch_server.post("/v1/batches", GOOD | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=x", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/batches?limit=101", "limit"),
    ],
)
def test_bad_pages_are_named(batch_server, path, param):
    answer = batch_server.get(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_without_a_folder_the_routes_say_what_is_missing(server):
    for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
        answer = server.get(path)
        assert answer.status_code == 404
        assert "--batch-path" in answer.json()["error"]["message"]


def test_requests_beside_a_batch_are_answered_first(batch_server, client):
    batch = begin(client, [long_line(f"r{n}", f"Story {n}") for n in range(30)])
    while (status := client.batches.retrieve(batch.id).status) != "in_progress":
        assert status == "validating"
        time.sleep(0.05)
    for n in range(5):
        answer = batch_server.post(
            CHAT, {"messages": [{"role": "user", "content": f"Hi {n}"}], "max_tokens": 4}
        )
        assert answer.status_code == 200
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts.completed < 30
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_each_line_has_one_result_though_the_server_is_killed(tmp_path):
    rng = random.Random(1)
    lines = [long_line(f"r{n}", f"Tell {n}", 24) for n in range(300)]
    lines[7]["body"]["model"] = "another"
    flags = ["--batch-path", str(tmp_path)]
    id, kills = None, 0
    while True:
        with serving(*flags) as server:
            client = client_of(server)
            id = id or begin(client, lines).id
            if kills < 3:
                target = 300 * (kills + rng.random()) / 4
                batch = client.batches.retrieve(id)
                while batch.request_counts.completed < target and batch.status in (
                    "validating",
                    "in_progress",
                ):
                    time.sleep(0.01)
                    batch = client.batches.retrieve(id)
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
                kills += 1
                continue
            batch = ended(client, id)
            assert (batch.request_counts.completed, batch.request_counts.failed) == (299, 1)
            results = rows(client, batch.output_file_id) + rows(client, batch.error_file_id)
            assert Counter(row["custom_id"] for row in results) == {f"r{n}": 1 for n in range(300)}
            return
