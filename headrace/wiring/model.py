"""Loads a model and builds the engine on it: weights, memory, runner."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.compute.adapters.store import AdapterStore
from headrace.compute.checkpoint import ModelError
from headrace.compute.device import DeviceFacts, apart
from headrace.compute.drafting.forward import GuardedProposer
from headrace.compute.drafting.loading import LoadedDraft, LoadedHead
from headrace.compute.grammar.compiler import Compiler
from headrace.compute.grammar.matchers import Matchers
from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.memory_plan import MemoryPlan, shown_bytes
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.gguf.file import is_gguf
from headrace.compute.model.hub import BUILTIN, model_name
from headrace.compute.model.shape import ModelShape
from headrace.compute.runner import LocalRunner
from headrace.config import ConfigError, ModelOptions, Options
from headrace.core.engine import Engine
from headrace.core.events import Finished
from headrace.core.prediction.step_curve import StepCost
from headrace.core.request import Request, SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.core.tenancy.kv_limits import KvBounds, kv_bounds
from headrace.core.tenancy.tenants import ServiceClass, Tenants
from headrace.fleet.leader import Leader
from headrace.observe.engine_series import NO_EXPERTS, ExpertLoad, expert_load
from headrace.observe.recording import Tell
from headrace.service.adapters import Adapters
from headrace.service.quota_meter import QuotaMeter
from headrace.service.sampling_defaults import DefaultsError, SamplingDefaults
from headrace.service.service import Service
from headrace.text.rendering import TemplateError
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer, TokenizerError
from headrace.wiring.controls import Controls, LocalControls, RunnerCounts
from headrace.wiring.drafting import ModelDrafts, reads_states
from headrace.wiring.engine import (
    check_policies,
    check_states,
    make_engine,
    make_knobs,
    resolve_overlap,
    step_cost,
)
from headrace.wiring.loading.adapters import adapter_bytes, check_base, check_lora
from headrace.wiring.loading.computing import Computing, load_computing, load_drafting
from headrace.wiring.loading.images import NO_IMAGES, TEXT_ONLY, OpenImages, open_images
from headrace.wiring.loading.kv_transfer import OpenTransfer, check_transfer
from headrace.wiring.loading.memory import OpenTiers, open_memory
from headrace.wiring.loading.ranks import check_parallel
from headrace.wiring.loading.text import ModelText, load_text
from headrace.wiring.memory_sleep import FileIdentity, LoadedWeights, SleepingMemory, file_identities
from headrace.wiring.recording import make_recorded_engine
from headrace.wiring.tenants import check_kv_bounds, check_moves, read_tenants

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFacts:
    """What loading a model has found, in whatever process. ``seconds`` holds the duration of each phase of start-up."""

    folder: Path
    shape: ModelShape
    ledger: MemoryPlan
    facts: DeviceFacts
    dtype: str
    quantization: str
    kv_dtype: str
    isa: str
    kernels: str
    notes: tuple[str, ...]
    seconds: dict[str, float]

    def found(self) -> dict[str, Any]:
        """These fields, without those of a subclass."""
        return {each.name: getattr(self, each.name) for each in fields(LoadedFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel(LoadedFacts, ABC):
    """A model that is ready to run, in this process or another; ``grammars`` are those of this process."""

    name: str
    grammars: Compiler
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    seed: int
    dummy: bool
    policy: str
    tenants: Tenants
    classes: tuple[ServiceClass, ...]
    transfer: OpenTransfer | None = None
    adapters: Adapters | None = None
    images: OpenImages = NO_IMAGES

    @property
    def computed_by(self) -> str:
        """The kernels and their instruction set, for reports: ``cpp avx512``."""
        return f"{self.kernels} {self.isa}".rstrip()

    @property
    @abstractmethod
    def controls(self) -> Controls:
        """What a server reads and changes of the engine."""

    @property
    @abstractmethod
    def gpu_uuid(self) -> str:
        """The UUID of the GPU in use, in NVML's format; empty if there is none."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run requests through the engine, so that one-time costs do not delay the first client request."""

    @abstractmethod
    def open_service(self, limits: Limits, **options: Any) -> Service:
        """A service of the engine; ``options`` are those of `Service`."""

    @abstractmethod
    def close(self, stopped: bool) -> str:
        """Free its memory if the engine ``stopped``; returns a note on the blocks saved for the next process."""


EXPERTS_SECONDS = 0.5
"""How often the loads of experts are counted at most: the counts are read with each step."""


class CountedExperts:
    """The load of a decoder's experts, some time ago."""

    def __init__(self) -> None:
        self._counted = -math.inf
        self._load = NO_EXPERTS

    def of(self, decoder: ModelDecoder) -> ExpertLoad:
        """The load, counted again if that is due."""
        now = time.monotonic()
        if now - self._counted >= EXPERTS_SECONDS:
            self._counted, self._load = now, expert_load(decoder.expert_loads())
        return self._load


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(ReadyModel):
    """A model in this process."""

    decoder: ModelDecoder
    engine: Engine
    runner: LocalRunner
    adapters: AdapterStore | None = None
    tiers: OpenTiers | None = None
    leader: Leader | None = None
    memory: SleepingMemory
    experts: CountedExperts = field(default_factory=CountedExperts)

    @property
    def controls(self) -> LocalControls:
        return LocalControls(self.engine, self._count_runner, self.memory)

    @property
    def gpu_uuid(self) -> str:
        if self.facts.kind != "cuda":
            return ""
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"

    def warm_up(self) -> None:
        warm_up(self)

    def open_service(self, limits: Limits, **options: Any) -> Service:
        return Service(self.engine, limits, interrupt=self.runner.interrupt, **options)

    def close(self, stopped: bool) -> str:
        return close(self) if stopped else ""

    def _count_runner(self) -> RunnerCounts:
        moved = {} if self.leader is None else self.leader.payload_bytes
        experts = self.experts.of(self.decoder)
        return RunnerCounts(self.runner.seconds, self.runner.padding_tokens, moved, experts)


def load(options: Options, tell: Tell | None = None) -> Loaded:
    """Load the model, size its memory, and build the engine; ``tell`` records the engine from its start.

    Raises:
        ConfigError: an option cannot be satisfied; the message says what would work.
    """
    seconds: dict[str, float] = {}
    check_policies(options.scheduler)
    try:
        return apart(lambda: _load(options, seconds, tell))
    except (ModelError, TokenizerError, TemplateError, DefaultsError, KernelsUnavailable) as error:
        raise ConfigError(str(error)) from error


def _load(options: Options, seconds: dict[str, float], tell: Tell | None) -> Loaded:
    check_parallel(options, recorded=tell is not None)
    check_transfer(options, recorded=tell is not None)
    check_lora(options, recorded=tell is not None)
    with timed(seconds, "text"):
        text = load_text(options.model, options.server.tool_call_parser)
    check_base(options, text.path)
    files = file_identities(text.files)
    with timed(seconds, "weights"):
        with_fingerprint = bool(options.cache.kv_offload_path or options.cache.kv_transfer_config)
        computing = load_computing(options.model, text.path, with_fingerprint=with_fingerprint)
    try:
        check_states(options, computing.shape)
        with timed(seconds, "weights"):
            knobs = make_knobs(options.scheduler, computing.device.type, computing.max_model_len)
            images = open_images(options, text, computing, knobs.batched_tokens)
            if images.encoder is not None:
                size = images.encoder.nbytes + options.images.cache_bytes
                computing = computing._replace(image_bytes=size)
            draft = load_drafting(options, computing.beside())
        built = _build(options, seconds, tell, _Parts(text, computing, draft, files))
        loaded = replace(built, images=images, notes=(*built.notes, *_image_notes(computing, images)))
        if loaded.transfer is not None:
            loaded.transfer.publish(loaded.engine.scheduler.pool)
        return loaded
    except BaseException:
        if computing.leader is not None:
            computing.leader.close()
        raise


class _Parts(NamedTuple):
    """The parts that are loaded before the memory is sized."""

    text: ModelText
    computing: Computing
    draft: LoadedDraft | LoadedHead | None
    files: tuple[FileIdentity, ...]


def _build(options: Options, seconds: dict[str, float], tell: Tell | None, parts: _Parts) -> Loaded:
    """Size the memory of a loaded model, and build the engine."""
    (text, computing, draft, _), (tenants, classes) = parts, read_tenants(options.scheduler.tenants)
    plans, shape, stages = options.scheduler, computing.shape, options.model.pipeline_parallel_size
    with timed(seconds, "memory"):
        knobs = make_knobs(plans, computing.device.type, computing.max_model_len, stages)
        overlap = 0 if reads_states(plans) else resolve_overlap(plans, computing.device.type, stages)
        matchers = Matchers(grammars := make_compiler(text.tokenizer, shape.vocab_size), plans.max_num_seqs)
        memory = open_memory(computing, draft, options, knobs, overlap, matchers)
    ledger, tiers, runner, drafts, transfer, adapters = memory
    engine = (make_engine if tell is None else partial(make_recorded_engine, tell))(
        *(plans, options.cache, runner),
        num_blocks=ledger.num_blocks,
        windows=ledger.windows,
        max_model_len=computing.max_model_len,
        knobs=knobs,
        cost=decoder_cost(shape, computing.device.type),
        overlap=overlap,
        classes=classes,
        weights=tenants.weights(),
        kv_bounds=_kv_bounds(tenants, classes, ledger, plans.scheduling_policy, recorded=tell is not None),
        tiers=tiers.sizes if tiers else None,
        state_cells=ledger.checkpoints,
        peers=transfer.importer if transfer else None,
        grammars=grammars,
        drafts=drafts,
        forced=matchers.forced,
        adapters=adapters,
    )
    return Loaded(
        name=served_names(options.model)[0],
        folder=text.path,
        shape=shape,
        decoder=computing.decoder,
        engine=engine,
        runner=runner,
        grammars=grammars,
        tokenizer=text.tokenizer,
        template=text.template,
        defaults=text.defaults,
        ledger=ledger,
        facts=computing.facts,
        dtype=str(computing.choice.dtype).removeprefix("torch."),
        quantization=computing.quantization,
        kv_dtype=str(computing.kv_dtype).removeprefix("torch."),
        isa=computing.kernels.isa,
        kernels=computing.kernels.name,
        seed=options.model.seed,
        dummy=options.model.load_format == "dummy",
        policy=plans.scheduling_policy,
        tenants=tenants,
        classes=classes,
        notes=(*_notes(computing, tiers, engine, tell), *_adapter_notes(options, computing)),
        seconds=seconds,
        tiers=tiers,
        leader=computing.leader,
        transfer=transfer,
        adapters=adapters,
        memory=_sleeping(engine, runner, drafts, options.model, parts),
    )


def _sleeping(
    engine: Engine, runner: LocalRunner, drafts: ModelDrafts | None, model: ModelOptions, parts: _Parts
) -> SleepingMemory:
    """The memory of an engine that may sleep."""
    decoder, folder = parts.computing.decoder, parts.text.path
    weights = LoadedWeights(decoder, runner.forget_batches, model, folder, parts.files)
    return SleepingMemory(engine, partial(_clear, runner, drafts), weights)


def _clear(runner: LocalRunner, drafts: ModelDrafts | None) -> None:
    """Give back the memory of all keys and values of a sleeping engine."""
    if drafts is not None and isinstance(drafts.proposer, GuardedProposer):
        drafts.proposer.clear()
    runner.clear()


def _adapter_notes(options: Options, computing: Computing) -> tuple[str, ...]:
    """The memory for adapters, which counts as weights."""
    given = options.adapters
    if not given.enable_lora:
        return ()
    size = shown_bytes(adapter_bytes(options, computing))
    return (
        f"LoRA: {size} of the weights for --max-loras {given.max_loras}, --max-lora-rank {given.max_lora_rank}",
    )


def _image_notes(computing: Computing, images: OpenImages) -> tuple[str, ...]:
    """The memory for images, which counts as weights, or why a model with an encoder takes none."""
    if images.encoder is not None:
        return (f"images: {shown_bytes(computing.image_bytes)} of the weights for their encoder and cache",)
    return () if images.why == TEXT_ONLY else (images.why,)


def _kv_bounds(
    tenants: Tenants, classes: tuple[ServiceClass, ...], ledger: MemoryPlan, policy: str, *, recorded: bool
) -> KvBounds:
    """The bounds on KV memory, of an engine that keeps them. Raises ConfigError if it does not."""
    bounds = kv_bounds(tenants, classes, ledger.kv_tokens)
    check_kv_bounds(bounds, policy, recorded=recorded)
    check_moves(classes, policy, recorded=recorded)
    return bounds


def make_meter(loaded: ReadyModel) -> QuotaMeter:
    """The meter of the tenants of a loaded model."""
    plan = loaded.ledger
    bounds = kv_bounds(loaded.tenants, loaded.classes, plan.kv_tokens)
    return QuotaMeter(loaded.tenants, loaded.name, bounds, plan.max_model_len)


def _notes(
    computing: Computing, tiers: OpenTiers | None, engine: Engine, tell: Tell | None
) -> tuple[str, ...]:
    """What is worth saying at start. Restores blocks of an earlier process; a recorded engine starts with none."""
    notes = [*computing.notes, *(tiers.notes if tiers else ())]
    checkpoints = engine.scheduler.pool.checkpoints
    if checkpoints is not None and not checkpoints.num_cells:
        notes.append("no checkpoints of recurrent states: every prompt is computed as a whole")
    if tiers is not None and tell is None:
        notes.append(tiers.recall(engine))
    return tuple(filter(None, notes))


def make_compiler(tokenizer: Tokenizer, vocab_size: int) -> Compiler:
    """The compiler of grammars over a vocabulary."""
    return Compiler(tokenizer.backend.to_str, vocab_size, tuple(tokenizer.eos_token_ids))


def served_names(model: ModelOptions) -> tuple[str, ...]:
    """The model's names in the API, the one in answers first.

    They are ``--served-model-name``, or else the hub name, or else the name of the folder or GGUF file.

    Raises:
        ConfigError: a name is empty, or stands twice.
    """
    if names := model.served_model_name:
        if not all(map(str.strip, names)) or len({*names}) < len(names):
            raise ConfigError(
                f"--served-model-name {' '.join(names)}: expected names that are different and not empty"
            )
        return names
    path = Path(model.model).expanduser()
    if model.model in BUILTIN or not path.exists():
        return (model.model,)
    return (model_name(path) if is_gguf(path) else path.resolve().name,)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Measure the duration of a phase of start-up."""
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


def decoder_cost(shape: ModelShape, device: str) -> StepCost:
    """The relative cost of rows of a model."""
    linear = shape.token_parameters - shape.vocab_size * shape.hidden_size
    return step_cost(linear, shape.attention_width, device)


def parameter_counts(shape: ModelShape) -> dict[str, int]:
    """The number of parameters, and of those that compute one token: fewer in a mixture of experts."""
    return {"num_parameters": shape.num_parameters, "active_parameters": shape.token_parameters}


def _rounded(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def describe(loaded: ReadyModel) -> list[str]:
    """A description of the loaded model, as lines for the terminal."""
    parameters, used = loaded.shape.num_parameters, loaded.shape.token_parameters
    active = f", {_rounded(used)} per token" if used < parameters else ""
    kv = f", keys and values in {loaded.kv_dtype}" if loaded.kv_dtype != loaded.dtype else ""
    spent = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in loaded.seconds.items())
    return [
        f"model        {loaded.name}: {loaded.shape.architecture}, {_rounded(parameters)} parameters{active}",
        f"computing    {loaded.dtype}{kv}, kernels {loaded.kernels}, {loaded.facts.threads or 'no'} CPU threads",
        *([f"linears      {loaded.quantization}"] if loaded.quantization else []),
        *([f"sampling     {defaults}"] if (defaults := loaded.defaults.describe()) else []),
        *loaded.ledger.describe(),
        *([f"kv transfer  {loaded.transfer.describe()}"] if loaded.transfer else []),
        *(f"note         {note}" for note in loaded.notes),
        f"start-up     {spent}",
    ]


def warm_up(loaded: Loaded) -> None:
    """Run requests through the engine, so that one-time costs do not delay the first client request."""
    compiles = loaded.kernels == "triton" and loaded.decoder.device.type == "cuda"
    requests = groups(compiles, loaded.ledger.max_model_len)
    with timed(loaded.seconds, "warm-up"):
        loaded.runner.compile_others()
        apart(lambda: answer(loaded.engine, requests))


def close(loaded: Loaded) -> str:
    """Close a model whose engine no longer steps; returns a note on the blocks that are saved for the next process."""
    if loaded.transfer is not None:
        loaded.transfer.close()
    left = loaded.tiers.save(loaded.engine) if loaded.tiers else ""
    loaded.runner.close()
    if loaded.adapters is not None:
        loaded.adapters.close()
    if loaded.leader is not None:
        loaded.leader.close()
    loaded.grammars.close()
    return left


# Warm-up requests, which run before those of clients, so that one-time costs do not delay these.
#
# On a CPU one is enough. Triton compiles each variant of a kernel when it is first launched, which takes
# about a second, and caches it in a folder for the next process (``TRITON_CACHE_DIR``, by default
# ``~/.triton/cache``). So on a GPU there are steps of each kind: one row and many, short and long prompts,
# contexts that several programs share, and a prefix that rows share.


_OUTPUT = 2
_RANDOM = SamplingParams(temperature=1.0, max_tokens=_OUTPUT, ignore_eos=True)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
_FILTERED = SamplingParams(
    temperature=1.0, top_k=20, top_p=0.9, presence_penalty=0.1, max_tokens=_OUTPUT, ignore_eos=True
)
_TOKENS = 64
"""Prompts have tokens below this number, which every vocabulary has."""
_LONG = 1100


def groups(compiles: bool, longest: int) -> list[list[Request]]:
    """Groups of requests that run together; ``compiles``: the kernels are compiled when they are first launched.

    A request has at most ``longest`` tokens.
    """
    shapes = [(1, 4, _RANDOM)]
    if compiles:
        shapes += [
            (1, 40, _FILTERED),
            (1, 300, _GREEDY),
            (1, _LONG, _GREEDY),
            (20, 5, _FILTERED),
            (48, 6, _GREEDY),
        ]
    made: list[list[Request]] = []
    for number, (count, length, params) in enumerate(shapes):
        some = min(length, longest - _OUTPUT)
        made.append([_request(f"{number}-{row}", number + row, some, params) for row in range(count)])
    if compiles and longest > _LONG + _OUTPUT:
        made.append([_request(f"shared-{row}", 0, _LONG, _GREEDY) for row in range(10)])
    return made


def _request(name: str, first: int, length: int, params: SamplingParams) -> Request:
    # Its arrival time is minus infinity, so no policy holds it back to form a larger batch.
    tokens = tuple((first + each) % _TOKENS for each in range(length))
    return Request(f"warm-up-{name}", tokens, params, arrived=-math.inf)


def answer(engine: Engine, requests: Sequence[Sequence[Request]]) -> None:
    """Run each group, and then empty the prefix cache."""
    for number, group in enumerate(requests, 1):
        if len(requests) > 1:
            logger.info("warm-up: steps of kind %d of %d", number, len(requests))
        for request in group:
            engine.submit(request, time.monotonic())
        running = len(group)
        while running:
            running -= sum(isinstance(event, Finished) for event in engine.step(time.monotonic()))
    while engine.wake_at(time.monotonic()) is not None:
        engine.step(time.monotonic())
    engine.reset_prefix_cache(lower=False)
    engine.take_events()
