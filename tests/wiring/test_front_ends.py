"""Several front ends: their processes; and every dialect, answered by the server itself and by two of them: equal texts
and log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import groupby
from types import SimpleNamespace

import httpx
import pytest

from headrace.api.auth.access import Hosts
from headrace.api.fronts.front import read_hello
from headrace.api.runtime import run
from headrace.api.runtime.connection import open_room
from headrace.compute.adapters.layout import adapter_layout
from headrace.compute.model.hub import resolve_model
from headrace.compute.model.weights import read_spec
from headrace.config import ConfigError, options
from headrace.observe.tracing import RequestSpans, Span
from headrace.response_cache.history import read_recorded
from headrace.service import model_servers
from headrace.wiring import front_ends
from headrace.wiring import server as wiring
from headrace.wiring.front_ends import FrontEnds, Ports, check_front_ends, http_path, open_front_end
from headrace.wiring.observability import Traces
from headrace.wiring.tenants import open_keys
from tests.api.image_text import data_url
from tests.doubles.adapters import write_adapter
from tests.doubles.tiny_encoder import write_cross_encoder, write_embedding_model
from tests.service.test_model_servers import ENDS, LISTENS, Programs, until

CONNECTOR = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_transfer_config": CONNECTOR}, "--kv-transfer-config"),
    ],
)
def test_options_that_need_one_front_end_are_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=f"--api-server-count: {named}"):
        check_front_ends(options({"model": "builtin", "api_server_count": 2, **given}))


def test_all_front_ends_have_sockets_at_one_port():
    ports = Ports(options({"model": "builtin", "port": 0}).server)
    made = [each for _ in range(3) for each in ports.sockets()]
    try:
        assert {each.getsockname()[1] for each in made} == {int(ports.url.rpartition(":")[2])}
    finally:
        for each in made:
            each.close()
        ports.close()


@pytest.mark.anyio
@pytest.mark.parametrize("lasting", [True, False])
async def test_the_server_ends_when_no_front_end_can_be_started_again(tmp_path, monkeypatch, lasting):
    monkeypatch.setattr(model_servers, "FIRST_DELAY_SECONDS", 0.001)
    own, ended = SimpleNamespace(getpid=os.getpid, kill=lambda pid, number: ended.append(number)), []
    monkeypatch.setattr(front_ends, "os", own)
    programs = Programs(LISTENS, LISTENS, *([LISTENS] if lasting else []), ENDS)
    ends = FrontEnds(2, "http://here", str(tmp_path), lambda name, path: programs())
    ends.owner, running = SimpleNamespace(connect=None), []
    ends.begin(running.append, "")
    await until(lambda: running)
    for each in ends.all:
        os.kill(each.pid, signal.SIGKILL)
    states = {model_servers.ModelState.FAILED, *([model_servers.ModelState.RUNNING] if lasting else [])}
    await until(lambda: {each.state for each in ends.all} == states)
    if lasting:
        assert (ended, ends.failure) == ([], "")
    else:
        await until(lambda: ended)
        assert ended == [signal.SIGTERM]
        assert "no front end could be started again" in ends.failure
    await ends.stop()
    ends.close()


pytestmark = pytest.mark.anyio

GIVEN = {
    "model": "builtin-draft",
    "device": "cpu",
    "max_num_seqs": 8,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 32 << 20,
    "enable_prefix_caching": False,  # a hit computes other shapes, whose last bits may differ
    "tool_call_parser": "hermes",
    "api_server_count": 2,
}

CHAT = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 24, "seed": 7}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["sea", "lake"]}, "deep": {"type": "boolean"}},
            "required": ["place", "deep"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "wet": {"type": "boolean"}},
    "required": ["size", "wet"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}

CHATS = {
    "sampled": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "several": {"n": 3, "logprobs": True},
    "stop": {"stop": ["e", "a"], "temperature": 1.0},
    "stop shown": {"stop": ["e"], "include_stop_str_in_output": True, "logprobs": True},
    "tools": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100},
    "one tool": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100},
    "schema": {"response_format": JSON_SCHEMA, "max_tokens": 100},
    "choice": {"structured_outputs": {"choice": ["calm", "rough"]}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"40": 5}},
    "token ids": {"return_token_ids": True},
    "ignored end": {"ignore_eos": True, "min_tokens": 10},
}

TEXT = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 3}
TEXTS = {
    "sampled": {"temperature": 1.0},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "prompts": {"prompt": ["Once", "Twice upon"], "n": 2},
    "best": {"best_of": 3, "n": 1, "temperature": 1.0},
    "scores": {"prompt_logprobs": 1},
    "stop": {"stop": ["a"], "temperature": 1.0},
    "regex": {"structured_outputs": {"regex": "[a-c]{3,9}"}},
}

MESSAGES = {"messages": CHAT["messages"], "max_tokens": 24, "temperature": 0.0}
CLAUDE_TOOL = {"name": "look_up", "input_schema": TOOL["function"]["parameters"]}
CLAUDES = {
    "plain": {},
    "stop": {"stop_sequences": ["e"]},
    "tools": {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 100},
}

RESPONSES = {"input": "Tell me about the sea.", "max_output_tokens": 24, "temperature": 0.0}
RESPONSE_TOOL = {"type": "function", "strict": True, **TOOL["function"]}
FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
ANSWERS = {
    "plain": {},
    "logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "tools": {"tools": [RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 100},
    "schema": {"text": FORMAT, "max_output_tokens": 100},
}

STREAMED = {"sampled", "logprobs", "several", "stop", "tools", "schema", "prompts", "plain"}

SCENES = [
    (path, name, {**common, **more}, stream)
    for path, common, scenes in (
        ("/v1/chat/completions", CHAT, CHATS),
        ("/v1/completions", TEXT, TEXTS),
        ("/v1/messages", MESSAGES, CLAUDES),
        ("/v1/responses", RESPONSES, ANSWERS),
    )
    for name, more in scenes.items()
    for stream in (False, True)
    if not stream or name in STREAMED
]


@asynccontextmanager
async def listening(app, chosen, path: str):
    """``app`` behind the server's own connections, at a Unix socket."""
    config = run._config(app, chosen.server, open_room(time.monotonic), uds=path, lifespan="on")
    server = run.SideServer(config)
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def served(tmp_path, fronts: int = 2, traces: Traces | None = None, **more):
    """A server with all its parts, and front ends before it, on one event loop. ``one`` is the server without them."""
    chosen = options(GIVEN | more)
    folder = str(tmp_path)
    ends = FrontEnds(fronts, "http://here", folder, lambda name, path: None)
    models = wiring._load(chosen)
    server = wiring._make_server(models, chosen, open_keys(chosen.server), traces, Hosts(()), ends)
    path = f"{folder}/calls"
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(listening(server.app, chosen, http_path(path)))
            direct = httpx.ASGITransport(server.app)  # so its streams are sent by messages of ASGI
            one = httpx.AsyncClient(transport=direct, base_url="http://127.0.0.1", timeout=60)
            await stack.enter_async_context(one)
            calls = await asyncio.get_running_loop().create_unix_server(ends.owner.connect, path)
            stack.callback(calls.close)
            clients = []
            for number in range(fronts):
                front = open_front_end(chosen, path, await read_hello(path))
                listens = listening(front.app, chosen, f"{folder}/{number}")
                clients.append(await stack.enter_async_context(listens))
            yield SimpleNamespace(one=one, fronts=clients, server=server, owner=ends.owner)
    finally:
        server.close()


OWN = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number", "request_id"}
"""Fields that each response has of its own."""

GROWING = {"content", "text", "arguments", "delta", "partial_json"}
"""Texts of a stream's events that are parts of one text; how many events there are depends on the time."""


def leaves(value: object, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], object]]:
    """The values of a body with their places; choices and tool calls are found by their index."""
    if isinstance(value, dict):
        for name in value.keys() - OWN:
            yield from leaves(value[name], (*path, name))
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict) and "index" in each:
                yield from leaves(each, (*path, each["index"]))
            else:
                yield (*path, "[]"), tuple(sorted(leaves(each, ()), key=repr))
    else:
        yield path, value


def said(text: str) -> dict[tuple[object, ...], object]:
    """What a response says, whether it is one body or a stream: texts, log-probabilities, reasons, usage."""
    # The number of tokens at the beginning of a stream depends on the time as well.
    bodies = [line[6:] for line in text.split("\n") if line.startswith("data: {")] or [text]
    values = defaultdict[tuple[object, ...], list[object]](list)
    for body in map(json.loads, bodies):
        for path, value in leaves(body, (body.get("type"),)):
            if path[0] != "message_start" or path[-1] != "output_tokens":
                values[path].append(value)
    return {
        path: "".join(filter(None, found))
        if path[-1] in GROWING
        else found
        if path[-1] == "[]"
        else [value for value, _ in groupby(found)]
        for path, found in values.items()
    }


async def test_a_front_end_that_starts_later_has_the_tenants_in_force(tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n  acme: {default_class: flex, classes: [flex]}\n")
    chosen = options(GIVEN | {"tenants": str(file)})
    asked = {"json": TEXT | {"service_tier": "priority"}, "headers": {"X-Tenant-Id": "acme"}}
    async with served(tmp_path, fronts=1, tenants=str(file)) as here:
        file.write_text("tenants: [")  # as a wrong change, which the server does not take over
        path = f"{tmp_path}/calls"
        front = open_front_end(chosen, path, await read_hello(path))
        async with listening(front.app, chosen, f"{tmp_path}/late") as late:
            answers = [await each.post("/v1/completions", **asked) for each in (late, *here.fronts, here.one)]
    assert {answer.status_code for answer in answers} == {400}
    assert len({answer.text for answer in answers}) == 1


async def test_a_reload_gives_front_ends_the_tenants_that_the_server_takes_over(tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n  acme: {default_class: flex, classes: [flex]}\n")
    more = {"tenants": str(file), "scheduling_policy": "priority"}
    chosen = options(GIVEN | more)
    asked = {"json": TEXT | {"service_tier": "priority"}, "headers": {"X-Tenant-Id": "acme"}}
    path = f"{tmp_path}/calls"
    async with served(tmp_path, fronts=1, **more) as here:
        front = open_front_end(chosen, path, await read_hello(path))
        async with listening(front.app, chosen, f"{tmp_path}/late") as late:

            async def answered(text: str) -> list[httpx.Response]:
                file.write_text(text)
                await here.server.reload()
                await front.reload()
                return [
                    await each.post("/v1/completions", **asked) for each in (late, *here.fronts, here.one)
                ]

            refused = await answered("tenants:\n  acme: {max_kv_tokens: 100}\n")  # this policy bounds nothing
            assert [each.status_code for each in refused] == [400, 400, 400]
            async with asyncio.timeout(60):
                while {each.status_code for each in await answered("tenants:\n  acme: {weight: 2}\n")} != {
                    200
                }:
                    await asyncio.sleep(0.01)


async def test_every_front_end_loads_and_answers_adapters(tmp_path):
    """Loaded at one of them, asked for at the other at once; other weights under the same name reuse nothing."""
    layout = adapter_layout(read_spec(resolve_model("builtin-draft")))
    sizes = {name: (each.outputs, each.inputs) for name, each in layout.modules.items()}
    folders = [write_adapter(tmp_path / f"a{seed}", sizes, seed=seed, size=2.0) for seed in range(2)]
    modules = {"lora_modules": [f"first={folders[0]}"], "enable_prefix_caching": True}

    async def text(client: httpx.AsyncClient, model: str) -> str:
        body = {**CHAT, "model": model, "temperature": 0.0}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return answer.json()["choices"][0]["message"]["content"]

    async def post(client: httpx.AsyncClient, verb: str, **body: object) -> int:
        return (await client.post(f"/v1/{verb}_lora_adapter", json=body)).status_code

    async with served(tmp_path, enable_lora=True, max_loras=2, **modules) as there:
        one, other = there.fronts
        plain, first = await text(one, "builtin-draft"), await text(one, "first")
        assert first != plain
        assert await text(other, "first") == first
        assert await post(one, "load", lora_name="second", lora_path=str(folders[0])) == 200
        assert await text(other, "second") == first
        again = {"lora_name": "second", "lora_path": str(folders[1])}
        assert await post(one, "load", **again) == 400
        assert await post(other, "load", **again, load_inplace=True) == 200
        second = await text(one, "second")
        assert second not in (first, plain)
        assert await text(other, "second") == second
        for client in (there.one, one, other):
            listed = (await client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["builtin-draft", "first", "second"]
        assert await post(other, "unload", lora_name="second") == 200
        answer = await one.post("/v1/chat/completions", json={**CHAT, "model": "second"})
        assert answer.status_code == 404
        assert await text(one, "builtin-draft") == plain
        metrics = (await one.get("/metrics")).text
        assert "lora_requests_info" in metrics


async def test_two_front_ends_answer_every_dialect_as_one_process_does(tmp_path):
    async with served(tmp_path) as there:
        for path, name, body, stream in SCENES:
            asked = {**body, "model": "builtin-draft", "stream": stream}
            if stream and path.endswith("completions"):
                asked["stream_options"] = {"include_usage": True}
            whole = await there.one.post(path, json=asked)
            assert whole.status_code == 200, (path, name, whole.text)
            other = await there.fronts[stream].post(path, json=asked)
            assert said(other.text) == said(whole.text), (path, name, stream)
            assert other.headers["content-type"] == whole.headers["content-type"]


async def test_front_ends_refuse_what_one_process_refuses(tmp_path):
    wrong = [
        ("/v1/chat/completions", {**CHAT, "temperature": -1}),
        ("/v1/chat/completions", {**CHAT, "unknown": 1}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 10_000}),
        ("/v1/chat/completions", {**CHAT, "model": "another"}),
        ("/v1/completions", {**TEXT, "echo": True, "logprobs": 1, "stream": True}),
        ("/v1/messages", {**MESSAGES, "max_tokens": 0}),
        ("/v1/responses", {**RESPONSES, "previous_response_id": "resp_0"}),
        ("/nowhere", {}),
    ]
    async with served(tmp_path, fronts=1) as there:
        for path, body in wrong:
            whole, other = [await each.post(path, json=body) for each in (there.one, *there.fronts)]
            assert whole.status_code >= 400, whole.text
            assert (other.status_code, said(other.text)) == (whole.status_code, said(whole.text))


async def test_any_front_end_knows_the_calls_of_all(tmp_path):
    async with served(tmp_path) as there:
        first, second = there.fronts
        answer = await first.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
        explained = (await second.get("/v1/requests/mine")).json()
        assert explained["id"] == answer.json()["id"]
        stored = (await first.post("/v1/responses", json=RESPONSES)).json()
        assert (await second.get(f"/v1/responses/{stored['id']}")).json() == stored
        metrics = [(await each.get("/metrics")).text for each in there.fronts]
        for each in metrics:
            assert re.search(r"headrace:request_success_total\{.*\} [1-9]", each)
        long = {**CHAT, "max_tokens": 450, "ignore_eos": True}
        running = asyncio.create_task(
            first.post("/v1/chat/completions", json=long, headers={"X-Request-Id": "long"})
        )
        while not running.done():
            await second.post("/abort_request", json={"request_id": "long"})
        assert (await running).status_code == 409
        async with asyncio.timeout(10):
            while there.server.service.open_requests():
                await asyncio.sleep(0.01)


EMBEDDED = [
    ("/v1/embeddings", {"input": ["the sea", "a fox jumps"]}),
    ("/v1/embeddings", {"input": "the sea", "encoding_format": "base64", "dimensions": 4}),
    ("/v1/embeddings", {"input": [1, 2, 3], "normalize": False, "model": "words"}),
    ("/v1/embeddings", {"input": "the sea " * 400}),
    ("/v1/embeddings", {"input": "the sea " * 400, "truncate_prompt_tokens": -1}),
    ("/v1/embeddings", {"input": "x", "dimensions": 4096}),
    ("/v1/embeddings", {"input": "x", "model": "another"}),
    ("/v1/embeddings", {"input": [1_000_000]}),
    ("/v1/rerank", {"query": "sea", "documents": ["a fox", "the sea"], "return_documents": True}),
    ("/rerank", {"query": "sea", "documents": ["a fox", "the sea"], "top_n": 1}),
    ("/v1/score", {"text_1": "sea", "text_2": ["a fox", "the sea"]}),
    ("/v1/score", {"text_1": ["sea"], "text_2": ["a fox", "the sea"], "unknown": 1}),
]


async def embedded_equally(there) -> None:
    """Every front end answers as the server itself does, and counts in its metrics and the tenant's usage."""
    for path, body in EMBEDDED:
        whole = await there.one.post(path, json=body)
        for each in there.fronts:
            other = await each.post(path, json=body)
            assert (other.status_code, said(other.text)) == (whole.status_code, said(whole.text)), path
    assert (await there.fronts[0].get("/v1/models")).json() == (await there.one.get("/v1/models")).json()


async def test_front_ends_embed_and_score_beside_a_model_that_generates(tmp_path):
    models = {
        "embedding_model": str(write_embedding_model(tmp_path / "words")),
        "rerank_model": str(write_cross_encoder(tmp_path / "pairs")),
    }
    async with served(tmp_path, **models) as there:
        await embedded_equally(there)
        priced = await there.fronts[0].post("/v1/embeddings", json={"input": "x", "include_cost": True})
        assert priced.status_code == 400
        assert "no prices" in priced.text


async def test_front_ends_of_a_server_that_only_embeds(tmp_path):
    (tmp_path / "tenants.yaml").write_text("tenants:\n  small:\n    requests_per_minute: 1\n")
    model = str(write_embedding_model(tmp_path / "folder"))
    more = {
        "served_model_name": ("words", "also"),
        "device_price": "3.6/h",
        "tenants": str(tmp_path / "tenants.yaml"),
    }
    async with served(tmp_path, model=model, **more) as there:
        await embedded_equally(there)
        first, second = there.fronts
        priced = (
            await first.post("/v1/embeddings", json={"input": "x", "model": "also", "include_cost": True})
        ).json()
        assert priced["model"] == "words"
        assert priced["usage"]["cost"] > 0
        small = {"X-Tenant-Id": "small"}
        answers = [
            await each.post("/v1/score", json=EMBEDDED[-2][1], headers=small) for each in (first, second)
        ]
        assert [each.status_code for each in answers] == [200, 429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "0"
        assert (await second.post("/v1/chat/completions", json=CHAT)).status_code == 404
        metrics = (await second.get("/metrics")).text
        for task, times in (("embed", 13), ("rerank", 6), ("score", 4)):
            ended = rf'embedding_requests_total{{finished_reason="stop",.*task="{task}"}} {times}\.0'
            assert re.search(ended, metrics), (task, times)


@pytest.mark.slow
async def test_front_ends_take_images_in_every_dialect(tmp_path, tmp_path_factory):
    """Answers, counts and refusals are those of one process; an image is encoded once for all front ends."""
    from tests.llm.test_images import file, made_llava  # they import transformers, which takes a second

    url, broken = data_url(file(1)[1]), data_url(b"GIF89a")
    shown = [{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": {"url": url}}]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    claude = [{"type": "image", "source": source}, {"type": "text", "text": "w1"}]
    inputs = [{"type": "input_text", "text": "w1"}, {"type": "input_image", "image_url": url}]
    asked = {"model": "fox", "temperature": 0.0}
    words = {"max_tokens": 6, "allowed_token_ids": list(range(1, 150))}

    def chat(*parts):
        return {**asked, **words, "messages": [{"role": "user", "content": [*parts]}]}

    scenes = [
        ("/v1/chat/completions", chat(*shown)),
        ("/v1/chat/completions", {**chat(*shown, *shown), "stream": True, "logprobs": True}),
        ("/v1/chat/completions", {**chat(*shown), "n": 2}),
        ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": broken}})),
        ("/v1/chat/completions", chat(*[shown[1]] * 4)),
        ("/v1/messages", {**asked, "max_tokens": 6, "messages": [{"role": "user", "content": claude}]}),
        ("/v1/messages/count_tokens", {"model": "fox", "messages": [{"role": "user", "content": claude}]}),
        ("/v1/responses", {**asked, "max_output_tokens": 6, "input": [{"role": "user", "content": inputs}]}),
        ("/tokenize", {"messages": chat(*shown)["messages"]}),
    ]
    more = {"served_model_name": ("fox",), "limit_mm_per_prompt": '{"image": 3}', "max_model_len": 120}
    model = str(made_llava(tmp_path_factory))
    async with served(tmp_path, model=model, **more) as there:
        for path, body in scenes:
            whole = await there.one.post(path, json=body)
            for each in there.fronts:
                other = await each.post(path, json=body)
                assert (other.status_code, said(other.text)) == (whole.status_code, said(whole.text)), path
        metrics = (await there.fronts[0].get("/metrics")).text
        queries, hits = [
            float(re.search(rf"mm_cache_{name}_total{{.*}} (\S+)", metrics)[1])
            for name in ("queries", "hits")
        ]
        assert queries - hits <= 2 < hits  # alone, and beside others
        images = [each._images for each in there.owner.connections]
        async with asyncio.timeout(10):
            while any(each.kept for each in images):
                await asyncio.sleep(0.01)


async def test_requests_of_any_front_end_are_in_one_history(tmp_path):
    file = tmp_path / "history.db"
    more = {"history_file": str(file), "record_history": True, "response_cache": "memory"}
    async with served(tmp_path, **more) as there:
        first, second = there.fronts
        for each in (first, second, first):
            assert (
                await each.post("/v1/chat/completions", json={**CHAT, "temperature": 0.0})
            ).status_code == 200
        assert (await second.post("/v1/completions", json=TEXT)).status_code == 200
        private = {**CHAT, "response_cache": {"no_store": True}}
        assert (await first.post("/v1/chat/completions", json=private)).status_code == 200
    found = {recorded.url: (times, tokens > 0) for recorded, times, tokens in read_recorded(file)}
    assert found == {"/v1/chat/completions": (3, True), "/v1/completions": (1, True)}


async def test_spans_of_any_front_end_are_exported_by_the_server(tmp_path):
    made: list[Span] = []
    traces = Traces(RequestSpans(made.append, 0.0), lambda: None)
    trace, parent = "ab" * 16, "cd" * 8
    with_trace = {"traceparent": f"00-{trace}-{parent}-01"}
    unsampled = {"traceparent": f"00-{trace}-{parent}-00"}
    async with served(tmp_path, traces=traces, otlp_traces_endpoint="http://localhost:1") as there:
        first, second = there.fronts
        answer = await first.post("/v1/chat/completions", json=CHAT, headers=with_trace)
        own = answer.headers["traceparent"].split("-")[2]
        relayed = await second.post("/v1/responses", json=RESPONSES, headers=with_trace)
        alone = (await second.post("/v1/completions", json=TEXT)).headers["traceparent"]
        passed = await second.post("/v1/completions", json=TEXT, headers=unsampled)
        assert passed.headers["traceparent"] == unsampled["traceparent"]
        there.server.service.count()
        assert (await first.get("/health", headers=with_trace)).status_code == 200
        async with asyncio.timeout(10):
            while len(made) < 12:
                await asyncio.sleep(0.01)
    roots = {span.name: span for span in made if span.server}
    assert set(roots) == {"chat builtin-draft", "POST /v1/responses", "text_completion builtin-draft"}
    chat = roots["chat builtin-draft"]
    assert (chat.trace_id, chat.span_id, chat.parent_id) == (trace, own, parent)
    assert chat.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert relayed.headers["traceparent"].split("-")[1:3] == [trace, roots["POST /v1/responses"].span_id]
    text = roots["text_completion builtin-draft"]
    assert (alone.split("-")[1:3], text.parent_id) == ([text.trace_id, text.span_id], "")
    for root in roots.values():
        below = [span for span in made if span.parent_id == root.span_id]
        assert {span.name for span in below} == {"queue", "prefill", "decode"}
        assert all(span.trace_id == root.trace_id for span in below)
    assert len(made) == 12


async def test_keys_hosts_origins_and_quotas_hold_at_any_front_end(tmp_path):
    (tmp_path / "tenants.yaml").write_text("tenants:\n  small:\n    requests_per_minute: 2\n")
    (tmp_path / "keys").write_text("secret small\n")
    (tmp_path / "keys").chmod(0o600)
    more = {
        "api_key_file": str(tmp_path / "keys"),
        "tenants": str(tmp_path / "tenants.yaml"),
        "allowed_origins": ("https://page.example",),
        "host": "0.0.0.0",
        "allowed_hosts": ("127.0.0.1",),
    }
    with_key = {"Authorization": "Bearer secret"}
    async with served(tmp_path, **more) as there:
        first, second = there.fronts
        for each in there.fronts:
            assert (await each.post("/v1/chat/completions", json=CHAT)).status_code == 401
            assert (await each.get("/v1/models")).status_code == 401
            assert (await each.get("/v1/models", headers=with_key)).status_code == 200
            evil = {**with_key, "Host": "evil.example"}
            assert (await each.get("/v1/models", headers=evil)).status_code == 403
            asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
            allowed = await each.options("/v1/chat/completions", headers=asks)
            assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        answers = [
            await each.post("/v1/chat/completions", json=CHAT, headers=with_key)
            for each in (first, second, first, second)
        ]
        assert [each.status_code for each in answers] == [200, 200, 429, 429]
        assert [each.headers["x-ratelimit-remaining-requests"] for each in answers[:2]] == ["1", "0"]
