"""The composition root: the one place that knows every class and sees every option.

``load`` makes an engine with its model, ``serve`` puts the HTTP server in front of it. Each class is handed just
what it needs; nothing below this file knows how the others are made.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.types import ASGIApp

from headrace import __version__
from headrace.compute.device import (
    DeviceFacts,
    device_facts,
    keep_freed_memory,
    limit_threads,
    resolve_device,
    resolve_dtype,
)
from headrace.compute.kernels import KernelsUnavailable, select
from headrace.compute.kv import PagedKV, bytes_per_block
from headrace.compute.ledger import MemoryLedger, ModelSize, open_ledger
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.spec import DecoderSpec, ModelError
from headrace.compute.model.weights import dummy_weights, load_weights
from headrace.compute.runner import LocalRunner
from headrace.config import ConfigError, ModelOptions, Options, SchedulerOptions, ServerOptions
from headrace.core.blocks import BlockPool, LeastRecentlyUsed
from headrace.core.cost import StepCost
from headrace.core.engine import Engine
from headrace.core.events import Event, Finished
from headrace.core.gate import Limits
from headrace.core.knobs import Knobs
from headrace.core.request import Request, SamplingParams
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous, StaticBatch
from headrace.core.scheduler.order import ByPriority, FirstComeFirstServed, OrderPolicy
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked
from headrace.observe.metrics import Metrics
from headrace.observe.requests import RequestBook
from headrace.serve.auth import Keys, read_keys
from headrace.serve.server.api import Api
from headrace.serve.server.app import create_app
from headrace.serve.server.model import ServedModel
from headrace.serve.server.notes import Notes
from headrace.serve.server.openapi import Docs
from headrace.serve.server.run import check_tls, run_server
from headrace.serve.server.status import Status
from headrace.serve.service import Service
from headrace.serve.text.template import ChatTemplate, TemplateError
from headrace.serve.text.tokenizer import Tokenizer, TokenizerError

BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Default of ``--max-num-batched-tokens``: enough to fill the matrix units, little enough to keep steps short."""

FIXED_TOKENS = {"cpu": 8.0, "cuda": 256.0}
"""Tokens whose linear layers cost as much as a step's fixed part: little on a CPU, where compute binds at once."""

OVERLAP = {"cpu": 0, "cuda": 1}
"""Default of ``--overlap``: on a CPU planning would only take a core, and the interpreter, from computing."""

ATTENTION_PENALTY = {"cpu": 3.0, "cuda": 2.0}
"""How much slower an operation of attention is than one of a linear layer."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, and what a caller may want to know of it. ``seconds`` are those of each phase."""

    name: str
    folder: Path
    spec: DecoderSpec
    engine: Engine
    runner: LocalRunner
    tokenizer: Tokenizer
    template: ChatTemplate
    ledger: MemoryLedger
    facts: DeviceFacts
    dtype: str
    kernels: str
    seed: int
    by_priority: bool
    notes: tuple[str, ...]
    seconds: dict[str, float]


def load(options: Options) -> Loaded:
    """Load the model, size its memory, and build the engine.

    Raises:
        ConfigError: something asked for cannot be had; the message says what would work.
    """
    seconds: dict[str, float] = {}
    try:
        return _load(options, seconds)
    except (ModelError, TokenizerError, TemplateError, KernelsUnavailable) as error:
        raise ConfigError(str(error)) from error


def _load(options: Options, seconds: dict[str, float]) -> Loaded:
    model, cache, plans = options.model, options.cache, options.scheduler
    with _timed(seconds, "text"):
        folder = resolve_folder(model.model, model.revision, with_weights=model.load_format != "dummy")
        text_folder = resolve_folder(model.tokenizer, with_weights=False) if model.tokenizer else folder
        tokenizer = Tokenizer.from_folder(text_folder)
        template = ChatTemplate.from_folder(text_folder, tokenizer.special_tokens, model.chat_template)
    with _timed(seconds, "weights"):
        spec = parse_config(read_config(folder))
        max_model_len = _max_model_len(model, spec)
        device = resolve_device(model.device)
        limit_threads()
        keep_freed_memory()
        facts = device_facts(device)
        choice = resolve_dtype(model.dtype, spec.dtype, facts)
        kernels = select(model.kernels, device)
        if model.load_format == "dummy":
            weights = dummy_weights(spec, choice.dtype, device, model.seed)
        else:
            weights = load_weights(folder, spec, choice.dtype, device)
        decoder = Decoder(spec, weights, kernels, max_model_len)
    with _timed(seconds, "memory"):
        knobs = _knobs(plans, device.type, max_model_len)
        overlap = OVERLAP[device.type] if plans.overlap is None else plans.overlap
        ledger = open_ledger(
            device_facts(device),
            ModelSize(
                weight_bytes=weights.nbytes,
                block_bytes=bytes_per_block(spec, cache.block_size, choice.dtype),
                hidden_size=spec.hidden_size,
                intermediate_size=spec.intermediate_size,
                vocab_size=spec.vocab_size,
                itemsize=choice.dtype.itemsize,
            ),
            cache,
            max_model_len=max_model_len,
            max_num_seqs=plans.max_num_seqs,
            max_num_batched_tokens=knobs.batched_tokens,
        )
        runner = LocalRunner(
            decoder,
            PagedKV(spec, ledger.num_blocks, cache.block_size, choice.dtype, device),
            vocab_size=spec.vocab_size,
            max_num_seqs=plans.max_num_seqs,
            max_model_len=max_model_len,
            device=device,
            background=overlap > 0 and device.type == "cpu",
        )
    events: list[Event] = []
    scheduler = Scheduler(
        BlockPool(ledger.num_blocks, cache.block_size, LeastRecentlyUsed(), events.append),
        _order(plans),
        _admission(plans),
        LastRanked(),
        events,
        max_num_seqs=plans.max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=cache.enable_prefix_caching,
        cost=_step_cost(spec, device.type),
    )
    return Loaded(
        name=model.served_model_name or model.model,
        folder=folder,
        spec=spec,
        engine=Engine(scheduler, runner, events, knobs, overlap),
        runner=runner,
        tokenizer=tokenizer,
        template=template,
        ledger=ledger,
        facts=facts,
        dtype=str(choice.dtype).removeprefix("torch."),
        kernels=kernels.name,
        seed=model.seed,
        by_priority=plans.scheduling_policy == "priority",
        notes=tuple(note for note in (choice.reason,) if note),
        seconds=seconds,
    )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - began


def _max_model_len(model: ModelOptions, spec: DecoderSpec) -> int:
    if model.max_model_len is None:
        return spec.max_positions
    if model.max_model_len > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: the model knows positions up to {spec.max_positions}"
        )
    return model.max_model_len


def _knobs(plans: SchedulerOptions, device: str, max_model_len: int) -> Knobs:
    tokens = plans.max_num_batched_tokens
    if tokens is None:
        tokens = max(BATCHED_TOKENS[device], plans.max_num_seqs)
        if not plans.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    elif tokens < plans.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {plans.max_num_seqs}: "
            "not all running sequences could decode in one step"
        )
    elif not plans.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens}: without chunked prefill a step must hold a whole prompt, "
            f"up to --max-model-len {max_model_len}"
        )
    return Knobs(
        batched_tokens=tokens,
        chunked_prefill=plans.enable_chunked_prefill,
        long_prefill_tokens=plans.long_prefill_token_threshold,
        mixed_prefill_ratio=plans.mixed_prefill_ratio,
    )


def _step_cost(spec: DecoderSpec, device: str) -> StepCost:
    """From counted operations: a token's linear layers take two per weight, its attention four per query element
    and position of context (q·k and weights·v)."""
    linear = 2 * (spec.num_parameters - spec.vocab_size * spec.hidden_size)
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * ATTENTION_PENALTY[device]
    return StepCost(FIXED_TOKENS[device], linear / attention)


def _order(plans: SchedulerOptions) -> OrderPolicy:
    return ByPriority() if plans.scheduling_policy == "priority" else FirstComeFirstServed()


def _admission(plans: SchedulerOptions) -> AdmissionPolicy:
    if plans.scheduling_policy == "static":
        return StaticBatch(plans.max_num_seqs, plans.static_batch_timeout)
    return Continuous()


def build_app(options: Options) -> tuple[ASGIApp, AbstractAsyncContextManager[None]]:
    """The server's application for use without a socket, and the context in which its engine runs."""
    keys = _keys(options.server)
    app, service = _make_app(load(options), options.server, keys)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.stop()

    return app, running()


def serve(options: Options, say: Callable[[str], None]) -> None:
    """Load, warm up, listen, until a signal ends it; ``say`` gets lines for the terminal.

    Raises:
        ConfigError: as `load`, or API keys or TLS files that cannot be read.
    """
    began = time.perf_counter()
    check_tls(options.server)
    keys = _keys(options.server)
    loaded = load(options)
    warm_up(loaded)
    app, service = _make_app(loaded, options.server, keys)
    for line in describe(loaded):
        say(line)

    def ready(url: str) -> None:
        say(f"ready        {url} after {time.perf_counter() - began:.2f} s")

    run_server(app, service, options.server, ready)


def _keys(options: ServerOptions) -> Keys:
    try:
        return Keys(read_keys(options.api_key, options.api_key_file))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _make_app(loaded: Loaded, options: ServerOptions, keys: Keys) -> tuple[ASGIApp, Service]:
    ledger = loaded.ledger
    metrics = Metrics(
        options.metrics_prefix,
        model_name=loaded.name,
        clock_offset=time.time() - time.monotonic(),
        cache_config={"block_size": str(ledger.block_size), "num_gpu_blocks": str(ledger.num_blocks)},
        phase_seconds=lambda: loaded.runner.seconds,
    )
    book = RequestBook(by_priority=loaded.by_priority)
    service = Service(
        loaded.engine,
        Limits(options.max_num_queued_reqs, options.max_num_queued_tokens),
        watchers=(metrics, book),
    )
    model = ServedModel(
        loaded.name,
        loaded.tokenizer,
        loaded.template,
        ledger.max_model_len,
        loaded.spec.vocab_size,
        root=str(loaded.folder),
        by_priority=loaded.by_priority,
    )

    notes = Notes()
    api = Api(
        service,
        model,
        notes,
        max_body_bytes=options.max_body_bytes,
        request_timeout=options.request_timeout,
    )
    status = Status(
        service,
        model,
        notes,
        explain=book.explain,
        metrics=metrics.render,
        info=lambda: (
            {"model": loaded.name, "dtype": loaded.dtype, "kernels": loaded.kernels}
            | {
                "ledger": asdict(ledger),
                "knobs": asdict(loaded.engine.knobs),
                "startup_seconds": loaded.seconds,
            }
        ),
        reset=loaded.engine.reset_prefix_cache,
        version=__version__,
    )
    return create_app(service, [*api.routes(), *status.routes(), *Docs(__version__).routes()], keys), service


def describe(loaded: Loaded) -> list[str]:
    """What was built, as lines for the terminal."""
    parameters = loaded.spec.num_parameters
    size = f"{parameters / 1e9:.2f}" + " B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}" + " M"
    spent = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in loaded.seconds.items())
    return [
        f"model        {loaded.name}: {loaded.spec.architecture}, {size} parameters",
        f"computing    {loaded.dtype}, kernels {loaded.kernels}, {loaded.facts.threads or 'no'} CPU threads",
        *loaded.ledger.describe(),
        *(f"note         {note}" for note in loaded.notes),
        f"start-up     {spent}",
    ]


def warm_up(loaded: Loaded) -> None:
    """Run one short request through the engine, so that the first caller does not pay for first uses."""
    began = time.perf_counter()
    params = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True)
    # It has waited for ever, so that no policy lets it wait for company.
    loaded.engine.submit(Request("warm-up", (0, 1, 2, 3), params, arrived=-math.inf), time.monotonic())
    while not any(isinstance(event, Finished) for event in loaded.engine.step(time.monotonic())):
        pass
    while loaded.engine.wake_at(time.monotonic()) is not None:
        loaded.engine.step(time.monotonic())
    loaded.engine.reset_prefix_cache()
    loaded.engine.take_events()
    loaded.seconds["warm-up"] = time.perf_counter() - began
