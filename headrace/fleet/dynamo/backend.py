"""The engine class for Dynamo's worker: starts an engine, serves requests, reports its load, and drains.

It implements ``dynamo.common.backend.LLMEngine`` except for its command line, which is that of `__main__`. Dynamo's
runtime is in Rust; it calls these methods on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from headrace.core.constraint import UnusableConstraint
from headrace.core.events import AdmitReason, Admitted, Event, Stepped
from headrace.core.request import InvalidParameter
from headrace.fleet.dynamo.answering import Answering, RequestFailed
from headrace.service.service import Refused

logger = logging.getLogger("headrace.fleet")

RANK = 0
"""A worker is one data-parallel rank."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded engine as the backend needs it.

    ``source`` is the folder or the hub name from which the frontend reads the tokenizer, ``name`` the model's name in
    the API. ``kv_endpoint`` is the ZeroMQ address of the KV events (None: there are none). ``close`` gives the engine's
    memory back and returns a note on what it saved.
    """

    answering: Answering
    name: str
    source: str
    max_num_seqs: int
    max_num_batched_tokens: int
    metrics: Collector
    kv_endpoint: str | None
    drain_seconds: float
    close: Callable[[], str]


class HeadraceBackend(LLMEngine):  # type: ignore[misc]
    """An engine behind Dynamo's router. ``open_parts`` loads it; it may block."""

    def __init__(self, open_parts: Callable[[], Parts]) -> None:
        self._open_parts = open_parts
        self._parts: Parts | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model; requests may come when this returns."""
        parts = self._parts = await asyncio.to_thread(self._open_parts)
        answering = parts.answering
        answering.service.start()
        return EngineConfig(
            model=parts.source,
            served_model_name=parts.name,
            llm=LlmRegistration(
                context_length=answering.max_model_len,
                kv_cache_block_size=answering.block_size,
                total_kv_blocks=answering.num_blocks,
                max_num_seqs=parts.max_num_seqs,
                max_num_batched_tokens=parts.max_num_batched_tokens,
            ),
        )

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the tokens as they come, and the end.

        Raises:
            InvalidArgument: the request cannot be served.
            EngineShutdown: the worker drains or the engine failed; Dynamo sends the request to another worker.
        """
        body = {**request, "token_ids": token_ids_to_list(request["token_ids"])}
        try:
            async for chunk in self._ready().answering.generate(body, context.id()):
                yield chunk
        except (InvalidParameter, UnusableConstraint) as error:
            raise InvalidArgument(str(error)) from error
        except (Refused, RequestFailed) as error:
            raise EngineShutdown(str(error)) from error

    async def abort(self, context: Any) -> None:
        """Cancel a request of a disconnected client."""
        self._ready().answering.abort(context.id())

    async def cleanup(self) -> None:
        """Let open requests end, then save the disk tier and free the engine's memory. A second call does nothing."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        await parts.answering.drain(parts.drain_seconds)
        if parts.answering.service.stop():
            note = await asyncio.to_thread(parts.close)
            logger.info("worker stopped%s", f": {note}" if note else "")

    async def kv_event_sources(self) -> list[ZmqSource]:
        """The sources of KV events for Dynamo."""
        endpoint = self._ready().kv_endpoint
        return [ZmqSource(endpoint=endpoint, dp_rank=RANK)] if endpoint else []

    async def register_prometheus(self, metrics: Any) -> None:
        """Add our metrics to those of the worker."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._ready().metrics)
        register_engine_registry(metrics, registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        """The ranks whose load is reported."""
        return [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Report the load to ``publisher`` from now on."""
        report = LoadReport(partial(publisher.publish, RANK))
        self._ready().answering.service.watch(report)

    async def health_check_payload(self) -> dict[str, Any]:
        """A request of one token that Dynamo sends to an idle worker."""
        payload: dict[str, Any] = build_health_check_payload(0)
        return payload

    def _ready(self) -> Parts:
        if self._parts is None:
            raise EngineShutdown("the worker has not been started or has ended")
        return self._parts


class LoadReport:
    """A `core.ports.Watcher` that reports KV cache usage to Dynamo's router at every step."""

    fold_tokens = None

    def __init__(self, publish: Callable[[ComponentSnapshot], None]) -> None:
        self._publish = publish
        self._known_tokens = 0
        self._cached_tokens = 0

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, Admitted) and event.reason is AdmitReason.NEW:
            self._cached_tokens += event.cached_tokens
            self._known_tokens += event.known_tokens
        elif isinstance(event, Stepped):
            self._publish(
                ComponentSnapshot(
                    kv_used_blocks=event.blocks_held,
                    kv_total_blocks=event.blocks_total,
                    gpu_cache_usage=event.blocks_held / event.blocks_total,
                    dp_rank=RANK,
                    kv_cache_hit_rate=self._hit_rate(),
                )
            )

    def _hit_rate(self) -> float | None:
        """The share of prompt tokens that were found in the prefix cache; None before the first request."""
        return self._cached_tokens / self._known_tokens if self._known_tokens else None
