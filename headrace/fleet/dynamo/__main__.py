"""``python -m headrace.fleet.dynamo MODEL``: a worker of NVIDIA Dynamo. Reads the command line and builds the engine.

Options of Dynamo's runtime (``--namespace``, ``--discovery-backend`` ...) are those of every Dynamo worker; all others
are options of ``headrace serve`` that concern the engine.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import typer
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.llm import ModelInput

from headrace.cli.help import CONTEXT, Command
from headrace.cli.options import with_options
from headrace.compute.model.hub import BUILTIN, resolve_folder
from headrace.config import (
    CacheOptions,
    ConfigError,
    ModelOptions,
    ObservabilityOptions,
    Options,
    SchedulerOptions,
)
from headrace.core.tenancy.gate import Limits
from headrace.fleet.dynamo.answering import Answering
from headrace.fleet.dynamo.backend import HeadraceBackend, Parts
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.service.service import Service
from headrace.wiring.model import Loaded, close, describe, load, make_meter, served_names, warm_up
from headrace.wiring.observability import add_build_info, open_kv_events

logger = logging.getLogger("headrace.startup")

PROGRAM = "python -m headrace.fleet.dynamo"
ENDPOINT = "backend.generate"
LOCAL_EVENTS = '{"endpoint": "tcp://127.0.0.1:*"}'
"""Default KV events of a worker: any free port, to which Dynamo's part of the process connects."""

OF_SERVERS = {each.name for each in fields(ObservabilityOptions)} - {"kv_events_config"}
"""Observability options that a worker does not have, since Dynamo handles its logs and traces."""


class Backend(HeadraceBackend):
    """`HeadraceBackend` with its command line."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[HeadraceBackend, WorkerConfig]:
        """The backend and Dynamo's configuration of an (unstarted) worker.

        Raises:
            ConfigError: an option cannot be used.
        """
        runtime, options = read_args(sys.argv[1:] if argv is None else argv)
        worker = WorkerConfig.from_runtime_config(
            runtime,
            model_name=_source(options.model.model),
            served_model_name=served_names(options.model)[0],
            model_input=ModelInput.Tokens,
        )
        return cls(partial(open_parts, options)), worker


def read_args(argv: Sequence[str]) -> tuple[DynamoRuntimeConfig, Options]:
    """The command line as Dynamo's configuration and ours.

    Raises:
        ConfigError: an option cannot be used.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, add_help=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    if {"--help", "-h", "--help-all"} & set(argv):
        print(parser.format_help().partition("\n\n")[2])
    known, rest = parser.parse_known_args(list(argv))
    found: list[Options] = []

    def worker(given: Options) -> None:
        """Serve a model as a worker of NVIDIA Dynamo."""
        found.append(given)

    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    parts = (ModelOptions, CacheOptions, SchedulerOptions, ObservabilityOptions)
    app.command(cls=Command, context_settings=CONTEXT)(with_options(*parts)(worker))
    try:
        app(rest, prog_name=PROGRAM)
    except SystemExit as ended:
        if ended.code:
            raise
    if not found:  # --help
        raise SystemExit(0)
    options = found[0]
    for name in sorted(OF_SERVERS & options.chosen):
        raise ConfigError(
            f"--{name.replace('_', '-')} is an option of headrace serve; logs of a Dynamo worker are Dynamo's"
        )
    runtime = DynamoRuntimeConfig.from_cli_args(known)
    runtime.validate()
    path = runtime.endpoint or f"{runtime.namespace}.{ENDPOINT}"
    runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(path)
    return runtime, options


def _source(model: str) -> str:
    """Where Dynamo's frontend finds the tokenizer: a hub name, or a folder."""
    return str(resolve_folder(model)) if model in BUILTIN else model


def open_parts(options: Options) -> Parts:
    """Load the model and build its service; the worker runs it on its event loop.

    Raises:
        ConfigError: see `headrace.wiring.model.load`.
    """
    began = time.perf_counter()
    observability = options.observability
    if observability.kv_events_config is None and options.cache.enable_prefix_caching:
        observability = replace(observability, kv_events_config=LOCAL_EVENTS)
    loaded = load(options)
    events = open_kv_events(loaded, replace(options, observability=observability))
    warm_up(loaded)
    ledger, page = loaded.ledger, MetricsPage()
    answering = Answering(
        _make_service(loaded, options, page),
        loaded.tokenizer,
        max_model_len=ledger.max_model_len,
        vocab_size=loaded.shape.vocab_size,
        block_size=ledger.block_size,
        num_blocks=ledger.num_blocks,
        check=loaded.grammars.check,
        defaults=loaded.defaults.params,
        windows=ledger.windows,
    )

    def end() -> str:
        note = close(loaded)
        if events is not None:
            events.close()
        return note

    for line in describe(loaded):
        logger.info("%s", line)
    logger.info("loaded       after %.2f s", time.perf_counter() - began)
    return Parts(
        answering=answering,
        name=loaded.name,
        source=_source(options.model.model),
        max_num_seqs=options.scheduler.max_num_seqs,
        max_num_batched_tokens=loaded.engine.knobs.batched_tokens,
        metrics=page,
        kv_endpoint=None if events is None else events.endpoint,
        drain_seconds=options.server.drain_timeout,
        close=end,
    )


def _make_service(loaded: Loaded, options: Options, page: MetricsPage) -> Service:
    """The service of a loaded model, whose metrics are on ``page``."""
    ledger, server = loaded.ledger, options.server
    add_build_info(page, loaded)
    metrics = Metrics(
        page,
        clock_offset=time.time() - time.monotonic(),
        cache_config={"block_size": str(ledger.block_size), "num_gpu_blocks": str(ledger.num_blocks)},
        phase_seconds=lambda: loaded.runner.seconds,
    )
    return Service(
        loaded.engine,
        Limits(server.max_num_queued_reqs, server.max_num_queued_tokens),
        watchers=(metrics,),
        meter=make_meter(loaded),
        interrupt=loaded.runner.interrupt,
    )


def main() -> None:
    """Run a worker until a signal ends it. A wrong setting is one line on stderr, not a traceback."""
    try:
        run(Backend)
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
