"""The endpoints of sleep, and where a model cannot sleep."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.api.operations.sleep import SleepRoutes
from headrace.config import Options
from headrace.service.service import Service
from headrace.service.sleep import Part, Sleep
from headrace.wiring.drafting import speculation
from headrace.wiring.feature import Feature
from headrace.wiring.model import ReadyModel


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
