"""A server of several models: a front without a model, and a process for each, which is a whole server of one model.

```
 front (address, TLS, keys) ── Unix socket ──> model_server: `headrace serve` of model A
                            ── Unix socket ──> model_server: `headrace serve` of model B
```
The models start one after another, so that each sees the memory that those before it have left.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from headrace.api.app import create_app
from headrace.api.models.routes import Below, ModelRoutes
from headrace.api.runtime.listening import check_address, check_tls, exposure_warning, hosts
from headrace.api.runtime.run import Apps, run_server
from headrace.config import ConfigError, Options, read_launch, read_systemd
from headrace.observe.log import install
from headrace.service.health_watch import HealthWatch, SystemdNotifier
from headrace.service.model_servers import (
    ModelServer,
    ModelServers,
    NotStarted,
    Report,
    Restarts,
    Started,
)
from headrace.wiring.tenants import open_keys

startup = logging.getLogger("headrace.startup")
shutdown = logging.getLogger("headrace.shutdown")

PROGRAM = "headrace.wiring.model_server"

UNSET = ("metrics_port", "ssl_certfile", "ssl_keyfile")
"""Options of the front that the models' servers do not have, also where a file or the environment names them."""


def serve_models(models: Sequence[Options], *, began: float) -> None:
    """Start the models, and serve them until a signal ends it. It logs to standard output.

    ``began`` is the start of the process by `time.perf_counter`.

    Raises:
        ConfigError: an address, API keys or TLS files cannot be used, or a model cannot be started.
    """
    log = install(sys.stdout, models[0].observability.log_level, models[0].observability.log_format)
    try:
        _check(models)
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            servers = ModelServers(
                [
                    ModelServer(each.model.model, path, partial(start_process, each, path))
                    for number, each in enumerate(models)
                    for path in [f"{folder}/{number}"]
                ]
            )
            try:
                _start(servers)
                _serve(servers, models, began)
            finally:
                servers.stop()
                shutdown.info("server stopped")
    finally:
        log.flush()


def _check(models: Sequence[Options]) -> None:
    server = models[0].server
    check_tls(server)
    check_address(server)
    if server.api_server_count > 1:
        raise ConfigError("--api-server-count: it is not supported with several models")
    if server.metrics_port is not None:
        raise ConfigError(
            "--metrics-port: it is not supported with several models; scrape /metrics of --port, with --metrics-key"
        )
    if read_launch() is not None:
        raise ConfigError("several models: they cannot be ranks of a launcher such as torchrun")
    if warning := exposure_warning(server, open_keys(server).keys.required):
        startup.warning("%s", warning)


def _start(servers: ModelServers) -> None:
    """Start all models.

    Raises:
        ConfigError: one does not start, two have the same name, or they may need more memory than there is.
    """
    names: dict[str, str] = {}
    reports: list[tuple[str, Report]] = []
    for each in servers.all:
        startup.info("starting     model %s", each.name)
        with _interruptible(servers):
            try:
                report = each.start()
            except NotStarted as error:
                raise ConfigError(str(error)) from error
        for name in report.names:
            if name in names:
                raise ConfigError(
                    f"two models have the name {name}; give one of them another served-model-name"
                )
            names[name] = each.name
        reports.append((each.name, report))
        check_memory(reports)


@contextmanager
def _interruptible(servers: ModelServers) -> Iterator[None]:
    """While a model loads, a signal ends the start."""

    def stop(number: int, frame: object) -> None:
        servers.stop()
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        servers.stop()
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def check_memory(reports: Sequence[tuple[str, Report]]) -> None:
    """Raise ConfigError if the models that started may together need more than their device has.

    A KV cache takes its memory when it is used, so each model alone would still see that memory as free.
    """
    device = reports[-1][1].device
    here = [(name, each) for name, each in reports if each.device == device and each.total_bytes]
    if len(here) < 2:
        return
    needed, room = sum(each.total_bytes for _, each in here), here[0][1].room_bytes
    if needed > room:
        listed = ", ".join(f"{name} {each.total_bytes / 2**30:.2f} GiB" for name, each in here)
        raise ConfigError(
            f"the models may need {needed / 2**30:.2f} GiB together ({listed}), and {device} had"
            f" {room / 2**30:.2f} GiB free at the start; reduce --kv-cache-memory-bytes of a model"
        )


def _serve(servers: ModelServers, models: Sequence[Options], began: float) -> None:
    server, link = models[0].server, read_systemd()
    keys, notifier = open_keys(server), SystemdNotifier(link.notify_socket)
    routes = ModelRoutes(servers, max_body_bytes=max(each.server.max_body_bytes for each in models))
    app = create_app(
        Restarts(servers),
        routes.routes(),
        keys.keys,
        [keys.watch, HealthWatch(servers, notifier, link.watchdog_seconds)],
        server.allowed_origins,
        hosts=hosts(server),
        forms=Below(),
    )

    async def reload() -> None:
        keys.reload()
        for each in servers.all:
            each.reload()

    def ready(url: str) -> None:
        startup.info("models       %s", ", ".join(name for each in servers.all for name in each.names))
        seconds = time.perf_counter() - began
        startup.info("ready        %s after %.2f s", url, seconds, extra={"fields": {"url": url}})
        notifier.send("READY=1")

    run_server(Apps(app), servers, server, ready, reload)


def start_process(options: Options, path: str) -> Started:
    """Start the server of one model at the socket ``path``, with options that were ``given`` to it and those of files.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    given = {**options.source.given, **dict.fromkeys(UNSET), "uds": path}
    file = options.source.file
    command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
    with theirs:  # a session of its own: signals of the terminal are the front's
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
    ours.sendall(json.dumps([given, None if file is None else str(file)]).encode() + b"\n")
    return Started(process, ours)
