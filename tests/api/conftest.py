from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from starlette import routing
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

from headrace.api.anthropic.routes import Messages
from headrace.api.app import BackgroundWork, create_app
from headrace.api.auth.api_keys import Grant, Keys
from headrace.api.batch.batches import Batches, Bounds
from headrace.api.batch.line_runner import (
    GeneratedLines,
    LineRunner,
    MessagesLines,
    PooledLines,
    ResponsesLines,
)
from headrace.api.batch.routes import BatchRoutes, Files
from headrace.api.batch.store import Limits as TenantLimits
from headrace.api.cache.routes import CacheApi, PairsApi
from headrace.api.cache.warm import Computing, Warm
from headrace.api.compile.markers import chosen
from headrace.api.compile.model import Dialect, ServedModel
from headrace.api.compile.policies import PromptPolicy, Rules
from headrace.api.embedding.calls import PoolingCalls
from headrace.api.embedding.routes import EmbeddingApi
from headrace.api.exchange import PARTS, Hooks
from headrace.api.openai.routes import Api
from headrace.api.openapi import Docs
from headrace.api.operations.access_log import AccessLog
from headrace.api.operations.requests import Abort, SessionsApi
from headrace.api.operations.served_model import AdapterRoutes, SleepRoutes
from headrace.api.operations.status import Pause, Status, UsageReport
from headrace.api.pages import Broadcast, Pages
from headrace.api.rate_limit_headers import rate_headers
from headrace.api.replies import StreamedAnswer
from headrace.api.responses.routes import BackgroundResponses, ResponsesApi
from headrace.api.responses.store import ResponseStore
from headrace.api.serving import CallNotes, Serving
from headrace.config import Options
from headrace.core.adapters import AdapterMissing
from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.memory.departure import PromptMemory
from headrace.core.memory.sessions import SessionBook
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.prediction.step_curve import TOKENS_ONLY
from headrace.core.request import FinishReason
from headrace.core.tenancy.gate import Limits
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.observe.cost.report import CostReport, focus_csv
from headrace.observe.cost.usage import TenantSavings
from headrace.observe.engine_series import NO_EXPERTS
from headrace.observe.metrics import HttpRequests, Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.prefixes import PrefixBook
from headrace.observe.requests import RequestBook
from headrace.observe.steps.timelines import Timelines
from headrace.observe.usage import UsageBook
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.rules.warming import IdleDetector
from headrace.response_cache.warmer import BackgroundRequests, Warmer
from headrace.service.adapters import AdapterNames
from headrace.service.answer import Answer
from headrace.service.embedding_models import PoolingModels
from headrace.service.embedding_worker import EmbeddingWorker
from headrace.service.quota_meter import QuotaMeter
from headrace.service.sampling_defaults import NO_DEFAULTS
from headrace.service.service import Service
from headrace.service.sessions import Sessions
from headrace.service.sleep import Sleep
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.wiring.controls import LocalControls, RunnerCounts
from headrace.wiring.memory_sleep import NotRestored, SleepingMemory
from headrace.wiring.pages import make_stepping
from headrace.wiring.tuning import Machine, make_tuning
from tests.doubles.engines import plain_engine
from tests.doubles.scripted_runner import ScriptedRunner
from tests.doubles.topics import Topics
from tests.text.vocabularies import byte_level
from tests.waiting import eventually

routing.compile_path = cache(routing.compile_path)
"""Each test builds an application, and the patterns of its routes would take a third of that time."""

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'explode' %}"
    "{{ raise_exception('no explosives') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ANSWER = "The naïve fox 😀 jumps over 日本語. END of it"


class PresentWeights:
    """`wiring.memory_sleep.Weights` that count; `restore` raises ``problem`` while there is one."""

    def __init__(self) -> None:
        self.dropped = self.restored = 0
        self.problem = ""

    def drop(self) -> None:
        self.dropped += 1

    def restore(self) -> None:
        if self.problem:
            raise NotRestored(self.problem)
        self.restored += 1


class Shelf:
    """A `service.adapters.Adapters`: folders named ``missing`` have no adapter; others have one with each look."""

    def __init__(self) -> None:
        self.looks = 0
        self.retired: list[str] = []

    def add(self, folder: Path) -> str:
        if folder.name == "missing":
            raise AdapterMissing("adapter_config.json cannot be read: No such file or directory")
        self.looks += 1
        return f"digest {self.looks}"

    def retire(self, adapter: str) -> None:
        self.retired.append(adapter)


@dataclass
class House:
    """A whole server in one process, over a scripted runner."""

    client: TestClient
    routes: list[Route]
    engine: Engine
    runner: ScriptedRunner
    service: Service
    model: ServedModel
    seen: list[Event]
    shelf: Shelf
    lookup: CacheLookup | None = None

    def fold(self, event: Event, now: float) -> None:
        self.seen.append(event)

    def counted(self) -> list[Event]:
        """All events so far. Watchers receive them some time after a response; they receive the others now."""

        async def count() -> None:
            self.service.count()

        self.client.portal.call(count)
        return [*self.seen]

    def quiet(self) -> None:
        """Wait until the engine holds nothing any more and all that happened has been counted."""
        eventually(lambda: not self.service.open_requests())
        self.counted()


def at_a_step(house: House, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], step: int = 4) -> None:
    """Call ``act`` on the engine's thread before this step, once a stream has been written to."""
    launch, write = house.runner.launch, StreamedAnswer._write
    written, steps = threading.Event(), itertools.count(1)

    async def noted(self: StreamedAnswer, data: bytes, more: bool = True) -> None:
        await write(self, data, more)
        written.set()

    def held(plan: StepPlan, now: float) -> None:
        if next(steps) == step:
            assert written.wait(60)
            act()
        launch(plan, now)

    monkeypatch.setattr(StreamedAnswer, "_write", noted)
    monkeypatch.setattr(house.runner, "launch", held)


def time_runs_out(house: House, monkeypatch: pytest.MonkeyPatch, step: int = 4) -> None:
    """The time of a call ends in the middle of its stream, however slow the machine is."""
    timers: list[Callable[[], None]] = []

    def end_in_time(answer: Answer, close: Callable[[Answer, FinishReason], None]) -> None:
        timers.append(lambda: close(answer, FinishReason.TIMEOUT))

    def act() -> None:
        house.runner.gate.clear()
        house.service._running_loop().call_soon_threadsafe(timers[0])

    monkeypatch.setattr(house.service, "end_in_time", end_in_time)
    at_a_step(house, monkeypatch, act, step)


def in_step(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step ends after the client has what the step before it drew, so that each is a chunk of its own.

    The loop takes no CPU time by its own clock: on a busy machine several tokens would share a chunk.
    """
    collect, write = house.runner.collect, StreamedAnswer._write
    writing = 0

    async def noted(self: StreamedAnswer, data: bytes, more: bool = True) -> None:
        nonlocal writing
        writing += 1
        try:
            await write(self, data, more)
        finally:
            writing -= 1

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        while writing:  # the client's thread takes it
            await asyncio.sleep(0)

    def collected() -> StepOutput:
        asyncio.run_coroutine_threadsafe(turns(), house.service._running_loop()).result(60)
        return collect()

    monkeypatch.setattr(StreamedAnswer, "_write", noted)
    monkeypatch.setattr(house.runner, "collect", collected)
    monkeypatch.setattr(house.service.pace, "_used", lambda: 0.0)


@cache
def dialect_of(template: str, tokenizer: Tokenizer) -> Dialect:
    """Probed once for all tests: probes take most of the time that a `house` takes."""
    return Dialect(ChatTemplate({"default": template}, added=tokenizer.added))


@pytest.fixture
def options() -> dict:
    """What a test may change before its `house` is built."""
    return {}


@pytest.fixture
def house(options: dict) -> Iterator[House]:
    house, app = build_house(options)
    with TestClient(app, raise_server_exceptions=False) as client:
        house.client = client
        yield house
        house.runner.gate.set()


class Leaving:
    """`exchange.ResponseParts` of a client that disconnects once ``begun`` is set."""

    def __init__(self, begun: threading.Event) -> None:
        self._begun = begun

    def watch(self, gone: Callable[[], None]) -> None:
        self._leaving = asyncio.create_task(self._leave(gone))

    async def _leave(self, gone: Callable[[], None]) -> None:
        assert await asyncio.to_thread(self._begun.wait, 60)
        gone()

    def unwatch(self) -> None:
        self._leaving.cancel()


async def disconnected(options: dict, path: str, body: dict, begun: threading.Event) -> list[Event]:
    """The events of a server whose client posts ``body`` and disconnects once ``begun`` is set; nothing is sent to it.

    Afterwards the server has no more work.
    """
    house, app = build_house(options)
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
    scope |= {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), PARTS: Leaving(begun)}
    house.service.start()
    await asyncio.wait_for(app(scope, receive, send), 60)
    assert await house.service.drain(60)
    house.service.stop()
    assert not sent
    return house.seen


def build_house(options: dict) -> tuple[House, ASGIApp]:
    """A house without a client, and its application."""
    tokenizer = options.get("tokenizer") or byte_level()
    max_num_seqs = options.get("max_num_seqs", 8)
    answer = tokenizer.encode(options.get("answer", ANSWER), add_special_tokens=False)

    def plain_reply(prompt: tuple[int, ...], seed: int) -> list[int]:
        return answer[seed % 3 :] if options.get("seeded") else answer

    reply = options.get("reply", plain_reply)

    assert tokenizer.eos_token_id is not None
    runner = ScriptedRunner(max_num_seqs, reply, tokenizer.eos_token_id, options.get("step_seconds", 0.0))
    num_blocks, block_size, max_model_len = (
        options.get("num_blocks", 256),
        4,
        options.get("max_model_len", 256),
    )
    engine = plain_engine(
        runner,
        num_blocks,
        block_size,
        overlap=options.get("overlap", 1),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        drafter=options.get("drafter"),
    )
    book, usage, savings, sheet = (
        RequestBook(),
        UsageBook(),
        TenantSavings(),
        MetricsPage(constant={"model_name": ""}),
    )
    metrics, lives = Metrics(sheet), Timelines()
    pricing = options.get("pricing", Pricing())
    cost = CostReport(CostLedger(pricing, began=time.monotonic()), "fox")
    seen: list[Event] = []
    rules = options.get("rules", Rules())
    limits = Limits(options.get("queued_requests", 64), options.get("queued_tokens", 10_000))
    template = options.get("template", TEMPLATE)
    model = ServedModel(
        "fox",
        tokenizer,
        ChatTemplate({"default": template}, added=tokenizer.added),
        max_model_len,
        tokenizer.vocab_size,
        rules=rules,
        stream_interval=options.get("stream_interval", 1),
        grammars=options.get("grammars"),
        trust_request_chat_template=options.get("trust_request_chat_template", False),
        defaults=options.get("defaults", NO_DEFAULTS),
        dialect=dialect_of(template, tokenizer),
    )
    model.images, model.pictures = options.get("images"), options.get("pictures") or model.pictures
    shelf = Shelf()
    model.adapters = AdapterNames(shelf, (*model.names, "builtin"))
    house = House(None, [], engine, runner, None, model, seen, shelf)  # type: ignore[arg-type]
    service = Service(
        engine,
        limits,
        [cost.ledger, book, usage, savings, metrics, lives, house],
        QuotaMeter(rules.tenants, "fox"),
        options.get("request_timeout", 30.0),
        stall_seconds=options.get("stall_seconds", 60.0),
    )

    def cost_of(request_ids: Iterable[str]) -> Mapping[str, Any]:
        service.count()
        return cost.usage_cost(request_ids)

    model.cost = cost_of if pricing.given else None
    lookup = house.lookup = options.get("lookup", CacheLookup)(service)
    notes = CallNotes()
    serving = Serving(
        lookup,
        model,
        notes,
        options.get("max_body_bytes", 100_000),
        options.get("request_timeout", 30.0),
        lambda tenant, model: rate_headers(service.meter.rooms(tenant, service.now(), model)),
    )
    api = Api(serving)
    store = ResponseStore(options.get("response_store"), options.get("response_store_bytes", 1 << 20))
    background = BackgroundResponses(store)
    responses = ResponsesApi(serving, store, background)
    messages = Messages(serving)
    prefixes = PrefixBook(PromptMemory(1 << 20), block_size, sheet, show_text=options.get("show_text", False))
    sessions = Sessions(
        SessionBook(num_blocks // 2),
        block_size,
        lambda keys, priority: service.thread.call(lambda: engine.retain(keys, priority)),
    )
    model.prompts = PromptPolicy(chosen(options.get("normalize", ())), prefixes.enter, sessions)
    for watcher in (prefixes, sessions):
        service.watch(watcher)

    async def explain_prefix(request_id, all_tenants):
        await prefixes.settled(request_id)
        return prefixes.explain(request_id, all_tenants)

    status = Status(
        service,
        model,
        notes,
        explain=book.explain,
        metrics=sheet.render,
        info=lambda: {"device": "none"},
        reset=engine.reset_prefix_cache,
        version="0",
        prefix=explain_prefix,
        predict_start=options.get("predict_start", lambda request_id, now: None),
        adapters=model.adapter_cards,
    )
    grants = dict.fromkeys(options.get("keys", ()), Grant()) | options.get("grants", {})
    weights = options.get("weights", PresentWeights())
    memory = SleepingMemory(engine, options.get("clear", lambda: None), weights)
    controls = LocalControls(engine, lambda: RunnerCounts({}, 0, {}, NO_EXPERTS), memory)
    tuning = make_tuning(Options(), controls, lookup, Machine("fox", "cpu", 1 << 12, 64, TOKENS_ONLY), lives)
    caches = CacheApi(lookup, metrics.caches.stats, savings.stats, max_body_bytes=100_000)
    accounts = UsageReport(
        service,
        usage.tenants,
        lambda tenant: {**usage.account(tenant), **cost.tenant(tenant)},
        cost.device,
        partial(focus_csv, cost),
    )
    computing = Computing(BackgroundRequests(lookup), service, model, 30.0)
    warmer = Warmer(
        computing.compute,
        lambda: service.awaited,
        IdleDetector(
            options.get("warm_below_rate", 1e-6), 0.0, 0.0
        ),  # the first call ends the quiet for good
        time.monotonic,
        time.time,
        batch=4,
        seconds_per_hour=3600.0,
        horizon_seconds=3600.0,
    )
    service.watch(warmer)
    warm = Warm(warmer, computing, model, max_body_bytes=100_000)
    parts = (
        api,
        responses,
        messages,
        Abort(notes, max_body_bytes=1000),
        status,
        Pause(service),
        SleepRoutes(Sleep(service, controls, options.get("refused_parts", {}))),
        AdapterRoutes(model.adapters, max_body_bytes=100_000),
        caches,
        PairsApi(lookup, max_body_bytes=100_000),
        accounts,
        warm,
        *tuning.endpoints,
        *make_stepping(controls, service, notes, lives, book.explain, {"block_size": block_size}),
        SessionsApi(model),
        Pages(Broadcast(service, Topics(), options.get("snapshot_seconds", 0.01))),
        Docs("0"),
    )
    worker = EmbeddingWorker(service, limits, 0.2)
    models = options.get("embedding_models", PoolingModels())
    bounds_of = {"max_body_bytes": 100_000, "request_timeout": options.get("request_timeout", 30.0)}
    calls = PoolingCalls(worker, models, service.now, model.cost)
    embedding = EmbeddingApi(calls, **bounds_of)
    routes = [route for part in (*parts, embedding) for route in part.routes()]
    beside: list[BackgroundWork] = [warmer, background, worker, *tuning.tasks]
    if "batch_path" in options:
        lines = GeneratedLines(lookup, model, notes, request_timeout=30.0)
        others = PooledLines(calls, request_timeout=30.0), ResponsesLines(responses), MessagesLines(messages)
        runner = LineRunner(service, (lines, *others))
        bounds, of_tenant = Bounds(100_000, 100_000, 100, 4), TenantLimits(100, 1_000_000, 10)
        batches = Batches(options["batch_path"], runner, of_tenant, bounds, time.time)
        routes += [*Files(batches).routes(), *BatchRoutes(batches, "fox", runner.endpoints).routes()]
        beside.append(batches)
    house.routes += routes
    requests, log = HttpRequests(sheet), AccessLog()
    hooks = Hooks(
        opened=(notes.name,),
        ended=(
            log.add,
            lambda exchange: log.flush(),  # records are asserted right after the response
            lambda exchange: requests.count(exchange.route, exchange.method, exchange.status),
        ),
    )
    app = create_app(lookup, routes, Keys(grants), beside, options.get("origins", ()), hooks)
    house.service = service
    return house, app
