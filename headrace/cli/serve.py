"""``headrace serve``: loads a model, prints what was built, and listens."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack

from headrace.cli.options import with_options
from headrace.cli.output import progress
from headrace.config import (
    AdapterOptions,
    BatchOptions,
    CacheOptions,
    CostOptions,
    EmbeddingOptions,
    ImageOptions,
    ModelOptions,
    ObservabilityOptions,
    Options,
    ResourceOptions,
    ResponseCacheOptions,
    SchedulerOptions,
    SemanticOptions,
    ServerOptions,
    TuningOptions,
    WarmOptions,
)


@with_options(
    ModelOptions,
    CacheOptions,
    SchedulerOptions,
    AdapterOptions,
    ImageOptions,
    EmbeddingOptions,
    ServerOptions,
    ResponseCacheOptions,
    SemanticOptions,
    WarmOptions,
    BatchOptions,
    ObservabilityOptions,
    CostOptions,
    ResourceOptions,
    TuningOptions,
)
def serve(given: Options) -> None:
    """Serve a model behind the OpenAI API."""
    began = time.perf_counter() - time.process_time()  # approximates the start of the process
    with ExitStack() as loading:
        loading.enter_context(progress(f"loading {given.model.model}"))
        gc.disable()  # garbage collection takes a fifth of the import time and finds nothing
        import torch  # noqa: F401 (first: its import looks at the file of each module that is there already)

        from headrace.wiring.server import serve as run

        gc.freeze()  # nor would later collections find anything among what was imported
        gc.enable()
        run(given, began=began, when_loaded=loading.close)
