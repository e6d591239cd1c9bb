"""The program of one front end of several: HTTP and text before an owner, started by `wiring.front_ends`.

It reads its options from a socket, its only argument, and reports there when it listens. It ends with the owner.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
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
from headrace.api.fronts.pooling import front_models
from headrace.api.openai.routes import Api
from headrace.api.routing import Endpoints
from headrace.api.runtime.listening import hosts
from headrace.api.runtime.run import Apps, run_server
from headrace.api.serving import Serving
from headrace.compute.encoder.models import TextTokenizer
from headrace.config import ConfigError, Options, ServerOptions, options
from headrace.observe.log import set_level
from headrace.service.model_servers import Report
from headrace.wiring.caches import chosen_markers
from headrace.wiring.generation import served_model
from headrace.wiring.images import make_reader
from headrace.wiring.loading.text import load_text
from headrace.wiring.model import make_compiler
from headrace.wiring.observability import begin_span, start_log
from headrace.wiring.reload import read_settings
from headrace.wiring.tenants import open_keys


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
