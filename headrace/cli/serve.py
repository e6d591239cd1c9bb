"""``headrace serve``: loads a model, prints what was built, and listens."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
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
    model_options,
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
    several=("model",),
)
def serve(given: Sequence[Options]) -> None:
    """Serve a model behind the OpenAI API, or several, each in a process of its own."""
    began = time.perf_counter() - time.process_time()  # approximates the start of the process
    models = model_options(given)
    if len(models) > 1 or models[0] is not given[0]:
        from headrace.wiring.models import serve_models

        serve_models(models, began=began)
    else:
        _serve_one(models[0], began)


def _serve_one(given: Options, began: float) -> None:
    with ExitStack() as loading:
        loading.enter_context(progress(f"loading {given.model.model}"))
        gc.disable()  # garbage collection takes a fifth of the import time and finds nothing
        import torch  # noqa: F401 (first: its import looks at the file of each module that is there already)

        from headrace.wiring.server import serve as run

        gc.freeze()  # nor would later collections find anything among what was imported
        gc.enable()
        run(given, began=began, when_loaded=loading.close)
