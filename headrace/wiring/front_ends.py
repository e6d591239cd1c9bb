"""Several front ends before one server (``--api-server-count``): their processes, and the sockets between them.

```
 port ── front end 1 ──┐ calls, over one connection each
      ── front end 2 ──┤──> this process: caches, admission, metrics, engine (or `--engine-process`)
      ── front end N ──┘ all other routes, as HTTP over a Unix socket
```
Each front end has a socket of its own at the port (``SO_REUSEPORT``), so that one that ends takes no connection of the
others with it, and new ones go to those that run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from headrace.api.anthropic.routes import Messages
from headrace.api.app import create_app
from headrace.api.cache.recorder import RequestRecorder
from headrace.api.compile.model import ServedModel
from headrace.api.embedding.calls import PoolingCalls
from headrace.api.embedding.routes import EmbeddingApi
from headrace.api.exchange import Hooks
from headrace.api.fronts.front import (
    Connecting,
    FrontNotes,
    FrontPrompts,
    Onward,
    OwnerConnection,
    read_hello,
)
from headrace.api.fronts.messages import Hello, SentText
from headrace.api.fronts.owner import Owner
from headrace.api.fronts.pooling import front_models
from headrace.api.openai.routes import Api
from headrace.api.routing import Endpoints
from headrace.api.runtime.listening import hosts, unix_socket
from headrace.api.runtime.run import Apps, run_server
from headrace.api.serving import Serving
from headrace.compute.encoder.models import TextTokenizer
from headrace.config import ConfigError, Options, ServerOptions, options, read_launch
from headrace.observe.log import set_level
from headrace.service.model_servers import (
    KILL_SECONDS,
    ModelServer,
    ModelState,
    NotStarted,
    Report,
    Restarts,
    Started,
)
from headrace.wiring.caches import chosen_markers
from headrace.wiring.generation import served_model
from headrace.wiring.images import make_reader
from headrace.wiring.loading.text import load_text
from headrace.wiring.model import make_compiler
from headrace.wiring.observability import begin_span, start_log
from headrace.wiring.reload import read_settings
from headrace.wiring.tenants import open_keys

logger = logging.getLogger(__name__)

OPTION = "--api-server-count"

PROGRAM = "headrace.wiring.front_ends"

UNSET = ("metrics_port",)
"""Options that a front end does not have, also where a file or the environment names them."""


def check_front_ends(options: Options) -> None:
    """Refuse options that need HTTP in the process of the caches, before anything is loaded.

    Raises:
        ConfigError: an option needs it.
    """
    for given, option in (
        (options.cache.kv_transfer_config is not None, "--kv-transfer-config"),
        (read_launch() is not None, "a launcher of ranks such as torchrun"),
    ):
        if given:
            raise ConfigError(f"{OPTION}: {option} needs one front end; leave one of them out")


class Ports:
    """The address that all front ends share. It is reserved until `close`."""

    def __init__(self, options: ServerOptions) -> None:
        self._held: list[socket.socket] = []
        self._addresses: list[tuple[socket.AddressFamily, tuple[object, ...]]] = []
        port = options.port
        for family, _, _, _, address in socket.getaddrinfo(
            options.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            bound = (address[0], port, *address[2:])
            held = _bound(family, bound)
            port = held.getsockname()[1]
            self._held.append(held)
            self._addresses.append((family, (address[0], port, *address[2:])))
        self.url = f"{'https' if options.ssl_certfile else 'http'}://{options.host}:{port}"

    def sockets(self) -> list[socket.socket]:
        """Sockets of another front end."""
        return [_bound(family, address) for family, address in self._addresses]

    def close(self) -> None:
        """Give the address back."""
        for each in self._held:
            each.close()


def _bound(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind(address)
    return made


class SharedSocket:
    """The Unix socket of ``--uds``, which all front ends accept at."""

    def __init__(self, path: str, held: socket.socket) -> None:
        self._held = held
        self.url = f"unix:{path}"

    def sockets(self) -> list[socket.socket]:
        """The socket, for another front end."""
        return [self._held.dup()]


@contextmanager
def opened_address(options: ServerOptions) -> Iterator[Ports | SharedSocket]:
    """The address of all front ends, until the block ends.

    Raises:
        ConfigError: it cannot be used.
    """
    if options.uds is not None:
        with unix_socket(options.uds) as held:
            yield SharedSocket(options.uds, held)
        return
    ports = Ports(options)
    try:
        yield ports
    finally:
        ports.close()


class FrontEnds:
    """The front ends of a server, as background work: they start when it listens, and end before it.

    ``start`` starts the front end with a name, before the owner's socket at a path. Clients know the server by ``url``;
    ``folder`` has the sockets between the processes.
    """

    def __init__(self, count: int, url: str, folder: str, start: Callable[[str, str], Started]) -> None:
        self.draining = False
        self.owner: Owner | None = None
        self.refusal = ""
        """Why a front end did not start with the server."""
        self.failure = ""
        """Why the server ended by itself."""
        self._path = f"{folder}/calls"
        self._url = url
        names = [str(number + 1) for number in range(count)]
        self.all = [
            ModelServer(name, self._path, partial(start, name, self._path), "front end") for name in names
        ]
        self._restarts = Restarts(self)
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def own_options(self, options: ServerOptions) -> ServerOptions:
        """The options of this process's own HTTP server, which only front ends reach."""
        return replace(options, uds=http_path(self._path), ssl_certfile=None, ssl_keyfile=None)

    def begin(self, ready: Callable[[str], None], own_url: str) -> None:
        """This process listens at ``own_url``: start the front ends, then call ``ready`` with the server's URL."""
        self._task = asyncio.get_running_loop().create_task(self._begin(ready))

    async def _begin(self, ready: Callable[[str], None]) -> None:
        assert self.owner is not None
        self._server = await asyncio.get_running_loop().create_unix_server(self.owner.connect, self._path)
        try:
            await asyncio.gather(*(asyncio.to_thread(each.start) for each in self.all))
        except NotStarted as error:
            self.refusal = str(error)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        await self._restarts.start()
        ready(self._url)
        await self._restarts.given_up()
        self.failure = "the server ends, because no front end could be started again"
        logger.error("%s", self.failure)
        os.kill(os.getpid(), signal.SIGTERM)

    def reload(self) -> None:
        """Let all front ends read keys and the log level again."""
        for each in self.all:
            each.reload()

    def _terminate(self) -> None:
        for each in self.all:
            each.send_signal(signal.SIGTERM)

    def start(self) -> None:
        """Nothing: `begin` starts them."""

    async def stop(self) -> None:
        """End the front ends, which send what they have; the server has drained."""
        self.draining = True
        if self._task is not None:
            self._task.cancel()
        await self._restarts.stop()
        self._terminate()
        running = [each for each in self.all if each.state is ModelState.RUNNING]
        await asyncio.gather(*(asyncio.to_thread(each.end, KILL_SECONDS) for each in running))
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """End what is left, at the end of this process."""
        self.draining = True
        self._terminate()
        for each in self.all:
            each.end(KILL_SECONDS)


def start_front_end(options: Options, address: Ports | SharedSocket, name: str, path: str) -> Started:
    """Start the front end ``name`` of an owner whose socket is at ``path``.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    sockets = address.sockets()
    numbers = [each.fileno() for each in sockets]
    given = {**options.source.given, **dict.fromkeys(UNSET)}
    file = options.source.file
    command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
    with theirs:  # a session of its own: signals of the terminal are this process's
        passed = [theirs.fileno(), *numbers]
        process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True)
    for each in sockets:
        each.close()
    sent = [given, None if file is None else str(file), name, path, numbers]
    ours.sendall(json.dumps(sent).encode() + b"\n")
    return Started(process, ours)


# -- in the process of a front end: HTTP and text before an owner
#
# It reads its options from a socket, its only argument, and reports there when it listens. It ends with the owner.


class FrontEnd(NamedTuple):
    """The application of a front end, its connection to the owner, and what reads keys again."""

    app: ASGIApp
    connection: OwnerConnection
    reload: Callable[[], Coroutine[Any, Any, None]]


def open_front_end(chosen: Options, owner: str, hello: Hello) -> FrontEnd:
    """A front end before the owner whose socket is at ``owner``; the start of its application connects it."""
    server, keys = chosen.server, open_keys(chosen.server)
    connection = OwnerConnection(owner, hello.similar)
    endpoints, model = list[Endpoints](), None
    if hello.text is not None:
        model = _model(chosen, hello.text, hello.costs, connection)
        serving = _serving(chosen, model, connection)
        endpoints += Api(serving), Messages(serving)
    endpoints += *_pooling(server, hello, connection), Onward(http_path(owner))
    begun = () if chosen.observability.otlp_traces_endpoint is None else (begin_span,)
    app = create_app(
        Connecting(connection),
        [route for each in endpoints for route in each.routes()],
        keys.keys,
        [keys.watch],
        server.allowed_origins,
        Hooks(begun, (connection.named,), (connection.ended,)),
        hosts(server),
    )

    async def reload() -> None:
        """Read keys and the log level again; the owner sends the tenants that it has taken over."""
        settings = await asyncio.to_thread(read_settings, chosen)
        set_level(settings.log_level)
        await asyncio.to_thread(keys.reload)

    return FrontEnd(app, connection, reload)


def run(chosen: Options, owner: str, sockets: list[socket.socket], report: Callable[[], None]) -> None:
    """Serve at ``sockets`` before the owner whose socket is at ``owner``, until it ends; ``report`` when ready."""
    front = open_front_end(chosen, owner, asyncio.run(read_hello(owner)))
    run_server(Apps(front.app), front.connection, chosen.server, lambda url: report(), front.reload, sockets)


def http_path(owner: str) -> str:
    """The socket of the owner's own HTTP server, beside that for calls."""
    return f"{owner}.http"


def _model(chosen: Options, sent: SentText, costs: bool, connection: OwnerConnection) -> ServedModel:
    text = load_text(chosen.model, chosen.server.tool_call_parser)
    grammars = make_compiler(text.tokenizer, sent.vocab_size)
    grammars.prepare()
    model = served_model(text, sent.max_model_len, sent.vocab_size, sent.rules, grammars, chosen)
    model.prompts = FrontPrompts(chosen_markers(chosen), retained=sent.keeps_sessions)
    model.adapters = connection.adapters
    connection.take_rules = partial(setattr, model, "rules")
    model.pictures, model.no_images = make_reader(chosen.images), sent.no_images
    if sent.image_part is not None:
        model.images = connection.takes_images(sent.image_part)
    if costs:
        model.cost = connection.cost
    return model


def _serving(chosen: Options, model: ServedModel, connection: OwnerConnection) -> Serving:
    server, warm = chosen.server, chosen.warm
    recorder = None
    if warm.history_file is not None:
        recorder = RequestRecorder(connection, warm.record_history)
    return Serving(
        *(connection, model, FrontNotes(connection), server.max_body_bytes),
        *(server.request_timeout, connection.headers, recorder),
    )


def _pooling(server: ServerOptions, hello: Hello, connection: OwnerConnection) -> list[Endpoints]:
    """The endpoints of embeddings and scores; without a model for them, the owner says what it lacks."""
    models = front_models(
        hello.pooling, lambda model: TextTokenizer.from_text(model.tokenizer, model.lower_case)
    )
    if not models.all():
        return []
    cost = connection.cost if hello.costs else None
    calls = PoolingCalls(connection.pooling, models, connection.now, cost)
    api = EmbeddingApi(
        calls,
        max_body_bytes=server.max_body_bytes,
        request_timeout=server.request_timeout,
        headers=connection.headers,
    )
    return [api]


def main() -> None:
    """Run the program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as lines:
        given, file, name, owner, numbers = json.loads(lines.readline())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        chosen = options(given, None if file is None else Path(file))
        log = start_log(chosen.observability)
        logging.getLogger("headrace.shutdown").setLevel(logging.WARNING)

        def report() -> None:
            channel.sendall(json.dumps(Report((name,))._asdict()).encode() + b"\n")

        try:
            run(chosen, owner, [socket.socket(fileno=each) for each in numbers], report)
        finally:
            log.flush()
    except ConfigError as error:
        print(f"headrace: front end {name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ConnectionError as error:
        print(f"headrace: front end {name}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
