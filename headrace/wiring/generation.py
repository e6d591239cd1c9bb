"""A model that generates text, behind its service and its response caches, and the features that need it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from headrace import __version__
from headrace.api.anthropic.routes import Messages
from headrace.api.batch.line_runner import GeneratedLines, LineEndpoints, MessagesLines, ResponsesLines
from headrace.api.cache.routes import CacheApi, PairsApi
from headrace.api.compile.model import Dialect, ServedModel
from headrace.api.compile.policies import Rules
from headrace.api.openai.routes import Api
from headrace.api.operations.requests import Abort, SessionsApi
from headrace.api.operations.served_model import AdapterRoutes, SleepRoutes
from headrace.api.operations.status import ListedModel, Status
from headrace.api.responses.routes import ResponsesApi, open_responses
from headrace.api.serving import CallNotes, Serving
from headrace.compute.grammar.compiler import Compiler
from headrace.config import ConfigError, Options, ServerOptions, read_modules
from headrace.core.adapters import AdapterError
from headrace.core.scheduler.start_estimate import estimate_fields
from headrace.core.tenancy.gate import Limits
from headrace.observe.metrics import AdapterRequests
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.readings import Folds
from headrace.response_cache.history import History
from headrace.response_cache.opening import open_caches, open_history
from headrace.response_cache.semantic.opening import open_verdicts
from headrace.response_cache.stores.opening import describe_caches
from headrace.service.adapters import AdapterNames, KnownAdapters
from headrace.service.service import Service
from headrace.service.sleep import Part, Sleep
from headrace.text.parsing.catalogue import UnknownParser
from headrace.text.template import ChatTemplate
from headrace.wiring.caches import Prompts, Warming, cache_parts, make_prompts, make_recorder, prefix_sizes
from headrace.wiring.drafting import speculation
from headrace.wiring.feature import Feature, Hall
from headrace.wiring.images import (
    ModelImages,
    image_card,
    image_feature,
    images_beside,
    make_reader,
)
from headrace.wiring.loading.text import ModelText
from headrace.wiring.model import ReadyModel, make_meter, parameter_counts, served_names
from headrace.wiring.observability import make_folds
from headrace.wiring.pages import make_pages
from headrace.wiring.tuning import machine_of, make_class_shares, make_tuning


class Generation(NamedTuple):
    """A loaded model with its service, its caches, and all folds over its events."""

    loaded: ReadyModel
    model: ServedModel
    hall: Hall
    folds: Folds
    prompts: Prompts
    warming: Warming
    history: History | None
    serving: Serving
    responses: ResponsesApi
    messages: Messages

    def lines(self) -> tuple[LineEndpoints, ...]:
        """The endpoints that lines of batches may call."""
        hall, timeout = self.hall, self.serving.request_timeout
        generated = GeneratedLines(hall.lookup, self.model, hall.notes, request_timeout=timeout)
        return generated, ResponsesLines(self.responses), MessagesLines(self.messages)


def open_generation(loaded: ReadyModel, options: Options, others: Sequence[str] = ()) -> Generation:
    """Connect a loaded model to its service, folds and caches; ``others`` are the names of the server's other models.

    Raises:
        ConfigError: an option cannot be used.
    """
    server, caching = options.server, options.response_cache
    model = make_model(loaded, options)
    # 1. The folds count the engine's events; the sizes of the caches are read when the metrics are.
    folds = make_folds(loaded, options, model, lambda: hall.lookup.sizes() | prefix_sizes(loaded))
    # 2. The service owns the engine's thread.
    service = _make_service(loaded, server, folds)
    # 3. Prompts are normalized and explained, then looked up in the response caches before the service.
    prompts = make_prompts(loaded, options, folds.page, service)
    model.prompts = prompts.policy
    model.adapters = make_adapter_names(loaded, options, others)
    model.images = images_beside(loaded, service)
    model.no_images = loaded.images.why
    if model.images is not None:
        model.card |= image_card(options.images)
    history, verdicts = open_history(options.warm), open_verdicts(options.semantic)
    parts = cache_parts(loaded, options, verdicts)
    lookup = open_caches(caching, options.semantic, service, parts, history)
    counts = folds.page, folds.metrics, folds.usage, folds.cost
    hall = Hall(loaded.name, service, lookup, CallNotes(), *counts, folds.usage_of)
    if folds.cost.ledger.pricing.given:
        model.cost = hall.cost_of
    # 4. The doors for text generation share the model, the caches and the limits.
    serving = Serving(
        *(lookup, model, hall.notes, server.max_body_bytes, server.request_timeout, hall.quota_headers),
        make_recorder(options.warm, history),
    )
    warming = Warming(options.warm, caching, server, lookup, model, history, verdicts)
    responses, messages = open_responses(server, serving), Messages(serving)
    return Generation(loaded, model, hall, folds, prompts, warming, history, serving, responses, messages)


def generation_features(text: Generation, options: Options, cards: Sequence[ListedModel]) -> list[Feature]:
    """The features of a server that generates text; ``cards`` are its other models."""
    hall, folds, warming = text.hall, text.folds, text.warming
    lookup, server = hall.lookup, options.server
    stats = folds.metrics.caches.stats, folds.savings.stats
    caches = CacheApi(lookup, *stats, max_body_bytes=server.max_body_bytes)
    pairs = PairsApi(lookup, max_body_bytes=server.max_body_bytes)
    abort = Abort(hall.notes, max_body_bytes=server.max_body_bytes)
    history = [] if text.history is None else [text.history]
    tuning = make_tuning(options, text.loaded.controls, lookup, machine_of(text.loaded), folds.timelines)
    return [
        Feature([Api(text.serving), text.messages, abort]),
        *make_adapters(text.loaded, options, text.model.adapters, folds.page),
        *(
            [image_feature(text.model.images, folds.page)]
            if isinstance(text.model.images, ModelImages)
            else []
        ),
        Feature([text.responses], background=[text.responses.background]),
        Feature([_make_status(text, cards)]),
        make_sleep(text.loaded, options, text.hall.service, [card.name for card in cards]),
        Feature([SessionsApi(text.model)], text.prompts.watchers),
        Feature([caches, pairs], lines=[*describe_caches(options.response_cache), *lookup.lines()]),
        Feature([warming.endpoint], [warming.warmer], background=[*history, warming.warmer]),
        Feature(tuning.endpoints, background=tuning.tasks),
        make_class_shares(text.loaded.classes, text.loaded.controls, hall, folds.goodput, tuning.tasks[1]),
        Feature(make_pages(text.loaded, options, text.model, hall.service, hall.notes, folds)),
    ]


def make_model(loaded: ReadyModel, options: Options) -> ServedModel:
    """The model as the endpoints see it.

    Raises:
        ConfigError: a parser is unknown.
    """
    loaded.grammars.prepare()
    model = served_model(
        ModelText(loaded.folder, (), loaded.tokenizer, loaded.template, loaded.defaults),
        loaded.ledger.max_model_len,
        loaded.shape.vocab_size,
        Rules(loaded.policy, {each.name: each for each in loaded.classes}, loaded.tenants),
        loaded.grammars,
        options,
    )
    if loaded.transfer is not None:
        model.sharing = loaded.transfer.sharing()
    model.card |= parameter_counts(loaded.shape)
    model.pictures = make_reader(options.images)
    return model


def served_model(
    text: ModelText, max_model_len: int, vocab_size: int, rules: Rules, grammars: Compiler, options: Options
) -> ServedModel:
    """The model as the endpoints of text see it, also in a front end.

    Raises:
        ConfigError: a parser is unknown.
    """
    name, *others = served_names(options.model)
    return ServedModel(
        name,
        text.tokenizer,
        text.template,
        max_model_len,
        vocab_size,
        source=str(text.path),
        rules=rules,
        stream_interval=options.server.stream_interval,
        dialect=_dialect(text.template, options.server),
        also_named=others,
        aliases=(options.model.model,),
        grammars=grammars,
        trust_request_chat_template=options.server.trust_request_chat_template,
        defaults=text.defaults,
    )


def _dialect(template: ChatTemplate, options: ServerOptions) -> Dialect:
    try:
        return Dialect(template, options.tool_call_parser, options.reasoning_parser)
    except UnknownParser as error:
        raise ConfigError(str(error)) from error


def _make_service(loaded: ReadyModel, options: ServerOptions, folds: Folds) -> Service:
    return loaded.open_service(
        Limits(options.max_num_queued_reqs, options.max_num_queued_tokens),
        watchers=folds.watchers,
        meter=make_meter(loaded),
        request_timeout=options.request_timeout,
    )


def _make_status(text: Generation, cards: Sequence[ListedModel]) -> Status:
    controls = text.loaded.controls

    def predict_start(request_id: str, now: float) -> dict[str, Any] | None:
        return estimate_fields(controls.estimate_start(request_id))

    return Status(
        text.hall.service,
        text.model,
        text.hall.notes,
        explain=text.folds.explain,
        metrics=text.folds.page.render,
        info=partial(_server_info, text.loaded),
        reset=controls.reset_prefix_cache,
        version=__version__,
        predict_start=predict_start,
        prefix=text.prompts.explain,
        not_yet=text.warming.not_yet,
        others=cards,
        adapters=text.model.adapter_cards,
    )


def _server_info(loaded: ReadyModel) -> dict[str, Any]:
    """The fields for ``GET /server_info``."""
    return {
        "model": loaded.name,
        **parameter_counts(loaded.shape),
        "dtype": loaded.dtype,
        "kernels": loaded.kernels,
        "isa": loaded.isa or None,
        "quantization": loaded.quantization or None,
        "ledger": asdict(loaded.ledger),
        "knobs": asdict(loaded.controls.knobs),
        "startup_seconds": loaded.seconds,
    }


# The endpoints of sleep, and where a model cannot sleep.


def make_sleep(loaded: ReadyModel, options: Options, service: Service, pooling: Iterable[str]) -> Feature:
    """The endpoints; ``pooling`` are the names of models for embeddings and scores."""
    return Feature([SleepRoutes(Sleep(service, loaded.controls, refused_parts(loaded, options, pooling)))])


def refused_parts(loaded: ReadyModel, options: Options, pooling: Iterable[str]) -> dict[Part, str]:
    """Why a part of the memory cannot be freed, by part."""
    model = options.model
    for given, name in (
        (model.tensor_parallel_size > 1, "--tensor-parallel-size"),
        (model.pipeline_parallel_size > 1, "--pipeline-parallel-size"),
        (loaded.facts.kind == "cuda", "a GPU"),
        (options.cache.kv_transfer_config is not None, "--kv-transfer-config"),
        (options.server.record_trace is not None, "--record-trace"),
    ):
        if given:
            return dict.fromkeys(Part, f"sleep is not supported with {name}")
    drafts = speculation(options.scheduler)
    for given, name in (
        (bool(loaded.shape.state_bytes), f"recurrent states ({loaded.shape.architecture})"),
        (drafts is not None and drafts.model is not None, "a draft model (--speculative-config)"),
        (options.adapters.enable_lora, "--enable-lora"),
        (loaded.name in pooling, "the served model as --embedding-model"),
    ):
        if given:
            return {Part.WEIGHTS: f"weights cannot be dropped with {name}; use level 1"}
    return {}


# The LoRA adapters of a server: those that are loaded at start, and the feature that loads and unloads
# others.


def make_adapter_names(
    loaded: ReadyModel, options: Options, others: Sequence[str] = ()
) -> AdapterNames | None:
    """The adapters by name, those of ``--lora-modules`` loaded; None without ``--enable-lora``.

    ``others`` are the names of the server's models for embeddings and scores.

    Raises:
        ConfigError: an adapter cannot be loaded.
    """
    if loaded.adapters is None:
        return None
    served = (*served_names(options.model), options.model.model)
    names = AdapterNames(loaded.adapters, (*served, *others))
    for name, path, base in read_modules(options.server.lora_modules):
        if base and base not in served:
            raise ConfigError(
                f"--lora-modules {name}: base_model_name {base!r:.200} is not the served model, {served[0]!r:.200}"
            )
        try:
            names.add(name, path)
        except AdapterError as error:
            raise ConfigError(f"--lora-modules {name}={path}: {error}") from None
    return names


def make_adapters(
    loaded: ReadyModel, options: Options, names: KnownAdapters | None, page: MetricsPage
) -> list[Feature]:
    """Routes that load and unload adapters, and their metric."""
    if not isinstance(names, AdapterNames):
        return []
    requests = AdapterRequests(page, options.adapters.max_loras, names.name_of, time.time)
    routes = AdapterRoutes(names, max_body_bytes=options.server.max_body_bytes)
    shown = [f"adapter      {each.name}: {each.path}" for each in names]
    return [Feature([routes], [requests], lines=shown)]
