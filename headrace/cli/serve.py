"""``headrace serve``: build everything, say what was built, listen."""

from __future__ import annotations

from headrace.cli.options import with_options
from headrace.config import (
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
)
def serve(given: Options) -> None:
    """Serve a model behind the OpenAI API."""
    from headrace.build.server import serve as run

    run(given, say=lambda line: print(line, flush=True))
