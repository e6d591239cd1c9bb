"""Connects the response caches, cache warming and the prompt policy to the engine that was loaded.

`response_cache.opening` builds the caches. Here is what it needs of other rooms: the identity of the engine, the
encoders of the semantic cache, stores of other packages, and for warming the API that computes a recorded request.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple, cast

from headrace import __version__
from headrace.api.cache.recorder import RequestRecorder
from headrace.api.cache.warm import Computing, Warm
from headrace.api.compile.markers import Marker, chosen
from headrace.api.compile.model import ServedModel
from headrace.api.compile.policies import PromptPolicy
from headrace.compute.encoder.sentences import PairJudge, Sentences
from headrace.config import ConfigError, Options, ResponseCacheOptions, ServerOptions, WarmOptions
from headrace.core.events import Layer
from headrace.core.memory.departure import Departure, PromptMemory
from headrace.core.memory.sessions import SessionBook
from headrace.core.ports import Store, StoreFacts, Watcher
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.prefixes import PrefixBook
from headrace.response_cache.history import History
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.opening import CacheParts
from headrace.response_cache.rules.key import Engine
from headrace.response_cache.rules.pairs import Verdicts
from headrace.response_cache.rules.warming import IdleDetector
from headrace.response_cache.semantic.opening import SemanticParts
from headrace.response_cache.stores.opening import FORMS, shown
from headrace.response_cache.warmer import BackgroundRequests, Warmer
from headrace.service.service import Service
from headrace.service.sessions import Sessions
from headrace.wiring.loading.text import weight_files
from headrace.wiring.model import ReadyModel
from headrace.wiring.plugins import Port, make_plugin

STORE = Port("--response-cache", "headrace.stores", Store, FORMS)
_BUILT_IN = {form.partition(":")[0] for form in FORMS}
_PLUGIN = re.compile(r"[\w.]+:[A-Za-z_].*")
_SNAPSHOTS = "snapshots"
"""The folder in which the hub library stores revisions, each in a folder named by its commit."""

SETTLE_SECONDS = 2.0
"""Time of low traffic before warming starts."""

LEAST_COMPARED = 256
"""Shorter prompts (in tokens) are not compared with earlier ones: if many short prompts arrive, comparing each takes
6 % of the server's time."""


def cache_parts(loaded: ReadyModel, options: Options, verdicts: Verdicts | None = None) -> CacheParts:
    """What the response caches need of the engine. ``verdicts`` are its model's, where it is the second judge."""
    controls = loaded.controls
    secret = options.response_cache.response_cache_secret or ""
    semantic = SemanticParts(
        encoder=lambda name: Sentences.from_name(name),
        judge=lambda name: PairJudge.from_name(name),
        proposes=controls.proposes_cached,
        spell=loaded.tokenizer.decode,
        seed=loaded.seed,
        adapts_audit=options.tuning.tuner == "on",
        verdicts=verdicts,
    )
    return CacheParts(
        engine=lambda persistent: engine_identity(loaded, persistent, secret),
        plugged_in=partial(_plugged_in, max_bytes=options.response_cache.response_cache_bytes),
        semantic=semantic,
        outputs=controls.outputs,
    )


def prefix_sizes(loaded: ReadyModel) -> dict[Layer, dict[str, StoreFacts]]:
    """The size of the prefix cache; its evictions are events of the engine."""
    blocks = loaded.controls.counts.cached_blocks
    return {Layer.PREFIX: {"device": StoreFacts(blocks, blocks * loaded.ledger.block_bytes, 0)}}


def _plugged_in(address: str, max_bytes: int) -> Store:
    """A store of another package: ``MODULE:CLASS`` or an entry point, with its address after another colon.

    Its class may take the ``address`` and ``max_bytes``, the memory limit of the in-process response cache.
    """
    first, _, rest = address.partition(":")
    if first in _BUILT_IN or (rest and not _PLUGIN.fullmatch(address)):
        raise ConfigError(f"--response-cache {shown(address)}: expected {', '.join(FORMS)} or MODULE:CLASS")
    name, own = first, rest
    if rest and not any(each.name == first for each in entry_points(group=STORE.group)):
        path, _, own = rest.partition(":")
        name = f"{first}:{path}"
    return cast(Store, make_plugin(STORE, name, address=own, max_bytes=max_bytes))


def engine_identity(loaded: ReadyModel, persistent: bool, secret: str = "") -> Engine:
    """The identity of the engine. For ``persistent`` or shared stores it covers the weight files."""
    computed = f"{loaded.facts.kind} {loaded.facts.isa} {loaded.dtype} {loaded.kv_dtype} {loaded.kernels} {loaded.isa}"
    return Engine(
        model=loaded.name,
        weights=_weights(loaded) if persistent else "",
        tokenizer=hashlib.sha256(loaded.tokenizer.backend.to_str().encode()).hexdigest(),
        template=loaded.template.digest,
        numerics=f"{computed} {loaded.quantization}" if loaded.quantization else computed,
        max_model_len=loaded.ledger.max_model_len,
        version=__version__,
        secret=hashlib.sha256(secret.encode()).hexdigest() if secret else "",
    )


def _weights(loaded: ReadyModel) -> str:
    """A digest of the weights, or a substitute: the commit they were downloaded from, or the seed of dummy weights."""
    if loaded.dummy:
        return f"dummy {loaded.seed}"
    folder = loaded.folder.absolute()
    if folder.parent.name == _SNAPSHOTS:
        return folder.name
    digest = hashlib.sha256()
    for path in weight_files(folder):
        digest.update(path.name.encode())
        digest.update(_digest_of(path))
    return digest.hexdigest()


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def make_recorder(options: WarmOptions, history: History | None) -> RequestRecorder | None:
    """The recorder that writes requests to the history."""
    return None if history is None else RequestRecorder(history, options.record_history)


class Warming:
    """The parts of warming: `warmer`, `endpoint`, and the condition for readiness."""

    def __init__(
        self,
        options: WarmOptions,
        caching: ResponseCacheOptions,
        server: ServerOptions,
        lookup: CacheLookup,
        model: ServedModel,
        history: History | None,
        verdicts: Verdicts | None = None,
    ) -> None:
        computing = Computing(
            BackgroundRequests(lookup), lookup.service, model, server.request_timeout, verdicts
        )
        clock: Callable[[], float] = time.monotonic
        settle = 0.0 if options.warm_before_ready else SETTLE_SECONDS
        self.warmer = Warmer(
            computing.compute,
            lambda: lookup.service.awaited,
            IdleDetector(options.warm_below_rate, settle, clock()),
            clock,
            time.time,
            batch=options.warm_batch,
            seconds_per_hour=options.warm_seconds_per_hour,
            horizon_seconds=caching.response_cache_ttl,
            history=history,
            pairs=(lambda: None) if verdicts is None else verdicts.next,
        )
        self.endpoint = Warm(self.warmer, computing, model, max_body_bytes=server.max_body_bytes)
        self._ready_by = clock() + options.warm_before_ready
        self._clock = clock

    def not_yet(self) -> str:
        """The work that must end before the server is ready; empty if there is none."""
        return "warming" if not self.warmer.settled and self._clock() < self._ready_by else ""


SESSION_SHARE = 0.5
"""Share of the KV cache's blocks that the sessions of one tenant may retain."""


class Prompts(NamedTuple):
    """The policy, and the explanation of prefixes (None: disabled)."""

    policy: PromptPolicy
    book: PrefixBook | None

    @property
    def watchers(self) -> list[Watcher]:
        """The watchers of the engine's events."""
        return [each for each in (self.book, self.policy.sessions) if each is not None]

    async def explain(self, request_id: str, all_tenants: bool) -> dict[str, object] | None:
        """Where the prompt of a request stopped matching the prefix cache; None if that is not known."""
        if self.book is None:
            return None
        await self.book.settled(request_id)
        return self.book.explain(request_id, all_tenants)


def _beside(find: Callable[[], Departure]) -> asyncio.Future[Departure]:
    """Find a departure on another thread."""
    return asyncio.get_running_loop().run_in_executor(None, find)


def chosen_markers(options: Options) -> tuple[Marker, ...]:
    """The markers of ``--normalize-prompts``.

    Raises:
        ConfigError: it names no marker.
    """
    try:
        return chosen(options.server.normalize_prompts)
    except ValueError as error:
        raise ConfigError(f"--normalize-prompts: {error}") from None


def make_prompts(loaded: ReadyModel, options: Options, page: MetricsPage, service: Service) -> Prompts:
    """The prompt policy and its parts, connected to the engine behind ``service``.

    Raises:
        ConfigError: ``--normalize-prompts`` names no marker.
    """
    markers = chosen_markers(options)
    ledger, caching, controls = loaded.ledger, options.cache.enable_prefix_caching, loaded.controls
    memory = options.server.prefix_memory_bytes
    book = None
    if memory:
        show = options.server.explain_prompt_text
        book = PrefixBook(
            PromptMemory(memory),
            ledger.block_size,
            page,
            caching=caching,
            show_text=show,
            least_tokens=LEAST_COMPARED,
            beside=_beside,
        )
    sessions = None
    if caching and options.server.record_trace is None:  # a replay could not repeat the effects of sessions
        sessions = Sessions(
            SessionBook(max(1, int(SESSION_SHARE * ledger.num_blocks))),
            ledger.block_size,
            lambda keys, priority: service.thread.call(lambda: controls.retain(keys, priority)),
        )
    return Prompts(PromptPolicy(markers, None if book is None else book.enter, sessions), book)
