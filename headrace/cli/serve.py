"""``headrace serve``: build everything, say what was built, listen."""

from __future__ import annotations

import gc
import time

from headrace.cli.options import with_options
from headrace.config import (
    BatchOptions,
    CacheOptions,
    ModelOptions,
    Options,
    ResponseCacheOptions,
    SchedulerOptions,
    SemanticOptions,
    ServerOptions,
    WarmOptions,
)


@with_options(
    ModelOptions,
    CacheOptions,
    SchedulerOptions,
    ServerOptions,
    ResponseCacheOptions,
    SemanticOptions,
    WarmOptions,
    BatchOptions,
)
def serve(given: Options) -> None:
    """Serve a model behind the OpenAI API."""
    began = time.perf_counter() - time.process_time()  # the command line itself has hardly ever waited
    gc.disable()  # what is imported stays: to search it for garbage again and again takes a fifth of the time
    from headrace.build.server import serve as run

    gc.enable()
    run(given, say=lambda line: print(line, flush=True), began=began)
