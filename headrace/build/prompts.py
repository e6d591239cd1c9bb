"""Builds what happens with prompts before they are submitted: normalization, explanation of prefixes, sessions."""

from __future__ import annotations

from typing import NamedTuple

from headrace.build.model import Loaded
from headrace.config import ConfigError, Options
from headrace.core.cache.prefix.prompt_memory import PromptMemory
from headrace.core.cache.prefix.sessions import SessionBook
from headrace.core.ports import Watcher
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.prefixes.book import PrefixBook
from headrace.serve.http.prompts.markers import Marker, chosen
from headrace.serve.http.prompts.policy import PromptPolicy
from headrace.serve.service import Service
from headrace.serve.sessions import Sessions

SESSION_SHARE = 0.5
"""Share of the KV cache's blocks that the sessions of one tenant may retain."""


class Prompts(NamedTuple):
    """The policy, and the explanation of prefixes (None: disabled)."""

    policy: PromptPolicy
    book: PrefixBook | None

    @property
    def watchers(self) -> list[Watcher]:
        """What follows the engine's events, without tokens."""
        return [each for each in (self.book, self.policy.sessions) if each is not None]

    def explain(self, request_id: str, all_tenants: bool) -> dict[str, object] | None:
        """Where the prompt of a request left the prefix cache; None if that is not known."""
        return None if self.book is None else self.book.explain(request_id, all_tenants)


def markers_of(options: Options) -> tuple[Marker, ...]:
    """The markers of ``--normalize-prompts``.

    Raises:
        ConfigError: there is no such marker.
    """
    try:
        return chosen(options.server.normalize_prompts)
    except ValueError as error:
        raise ConfigError(f"--normalize-prompts: {error}") from None


def make_prompts(
    loaded: Loaded, options: Options, markers: tuple[Marker, ...], page: MetricsPage, service: Service
) -> Prompts:
    """The parts, connected to the engine behind ``service``."""
    ledger, caching = loaded.ledger, options.cache.enable_prefix_caching
    memory = options.server.prefix_memory_bytes
    book = None
    if memory:
        show = options.server.explain_prompt_text
        book = PrefixBook(PromptMemory(memory), ledger.block_size, page, caching=caching, show_text=show)
    sessions = None
    if caching and options.server.record_trace is None:  # a replay could not repeat what sessions change
        sessions = Sessions(
            SessionBook(max(1, int(SESSION_SHARE * ledger.num_blocks))),
            ledger.block_size,
            lambda keys, priority: service.thread.call(lambda: loaded.engine.retain(keys, priority)),
        )
    return Prompts(PromptPolicy(markers, None if book is None else book.enter, sessions), book)
