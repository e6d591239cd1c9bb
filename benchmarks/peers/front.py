"""A minimal server for an engine that has none: ``POST /v1/completions`` as a stream of tokens.

Standard library only, since it runs in the peers' environments. A thread reads the request; the engine's own thread
writes each token to the socket, so that little overhead is between the engine and its client.
Only requests of `headrace.lab.bench.client` are supported: token ids, greedy, exactly ``max_tokens`` long.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


class Stream:
    """The streamed answer of one request. Only the engine's thread calls `put`, and then `end`."""

    def __init__(self, request: BaseHTTPRequestHandler) -> None:
        self._out = request.wfile
        self._tokens = 0
        self.ended = threading.Event()

    def put(self, tokens: Sequence[int]) -> None:
        """Send tokens; a disconnected client is ignored."""
        self._tokens += len(tokens)
        self._send(_event({"choices": [{"index": 0, "text": "", "token_ids": list(tokens)}]}))

    def end(self, prompt_tokens: int) -> None:
        """Send finish reason and usage, and close the connection."""
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self._tokens}
        last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}
        self._send(_event(last) + b"data: [DONE]\n\n")
        self.ended.set()

    def _send(self, data: bytes) -> None:
        try:
            self._out.write(data)
        except OSError:
            self.ended.set()


def _event(told: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


class Engine(Protocol):
    """The engine behind the server."""

    def submit(self, prompt: Sequence[int], max_tokens: int, stream: Stream) -> None:
        """Takes a request from any thread; its answer goes to ``stream``."""
        ...


def serve(engine: Engine, name: str, port: int) -> None:
    """Serves ``engine`` as model ``name`` on loopback until the process ends."""

    class Request(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # else a small write waits for the answer to the one before

        def do_GET(self) -> None:
            """``/health`` and ``/v1/models``."""
            body = json.dumps({"object": "list", "data": [{"id": name, "object": "model"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            """``/v1/completions``, streamed; the connection ends with the answer."""
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            stream = Stream(self)
            engine.submit(asked["prompt"], asked["max_tokens"], stream)
            stream.ended.wait()

        def log_message(self, *_: object) -> None:
            """Do not log: a line per request would take time from the engine."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    Server(("127.0.0.1", port), Request).serve_forever()
