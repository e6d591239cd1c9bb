"""A lean streaming client of the OpenAI API: one request in, one `Record` out.

The same client measures every server. It records the time of each chunk, and parses chunks only after all responses
have ended, because a client on the same cores takes CPU time from the server. An incomplete response counts as failed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from headrace.lab.bench.connection import Connections
from headrace.lab.bench.record import Record, wrong_length
from headrace.lab.workload import Work
from headrace.lab.workload.work import is_chat

DELTAS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat chunk that carry output; reasoning and tool calls are generated like text."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address, model and options of requests. ``extra`` is added to every body (``{"return_token_ids": true}`` ...)."""

    url: str
    model: str
    api_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 600.0

    def address(self, work: Work) -> str:
        path = "chat/completions" if is_chat(work.prompt) else "completions"
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    def headers(self, work: Work) -> dict[str, str]:
        """Headers: the API key, and the tenant if the workload has one."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return headers | ({"X-Tenant-Id": work.tenant} if work.tenant != "default" else {})

    def body(self, work: Work) -> dict[str, Any]:
        """The request as JSON; fields that are not OpenAI's are added only if the work needs them."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": work.max_tokens,
            "temperature": work.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if isinstance(work.prompt, str):
            body["prompt"] = work.prompt
        elif is_chat(work.prompt):
            body["messages"] = [message._asdict() for message in work.prompt]
        else:
            body["prompt"] = list(work.prompt)
        if work.ignore_eos:
            body["ignore_eos"] = True
        if work.service_class != "default":
            body["service_tier"] = work.service_class
        return {**body, **self.extra}


class Answer:
    """The stream of one response, fed piece by piece with times. Its content is known after `read`."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.finish_reason = ""
        self.error = ""
        self.done = False
        self._pieces: list[tuple[bytes, float]] = []
        self._pending = b""
        self._token_ids = 0
        self._generated = False
        self._ends = 0
        self._ended: float | None = None
        self._began: float | None = None
        self._prompt_tokens = self._output_tokens = self._cached_tokens = 0

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes as they arrive from the network."""
        self._pieces.append((data, now))

    def read(self) -> None:
        """Parses the bytes that were fed; a chunk counts when its line is complete."""
        pieces, self._pieces = self._pieces, []
        for data, now in pieces:
            lines = (self._pending + data).split(b"\n")
            self._pending = lines.pop()
            carried, ends, self._generated = False, self._ends, False
            for line in lines:
                line = line.rstrip(b"\r")
                if line.startswith(b"data:") and self._chunk(line[5:].strip()):
                    carried = True
            if carried:
                self.times.append(now)
            if self._ends > ends:
                self._ended = now
            if self._generated and self._began is None:
                self._began = now

    def _chunk(self, payload: bytes) -> bool:
        """Parses one event; returns whether it carried output."""
        if payload == b"[DONE]":
            self.done = True
            return False
        try:
            chunk = json.loads(payload)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.error = self.error or f"not a JSON object: {payload[:80]!r}"
            return False
        if error := chunk.get("error"):  # some servers send an object, as OpenAI does, others only the text
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return False
        if usage := chunk.get("usage"):
            self._prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._output_tokens = int(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            self._cached_tokens = int(details.get("cached_tokens") or 0)
        carried = False
        for choice in chunk.get("choices") or ():
            if reason := choice.get("finish_reason"):
                self.finish_reason, self._ends = reason, self._ends + 1
            token_ids = choice.get("token_ids") or ()
            self._token_ids += len(token_ids)
            delta = choice.get("delta") or {}
            # A chunk that only names the role comes before any token; all others follow a token.
            self._generated = self._generated or bool(reason) or "role" not in delta
            parts = (token_ids, choice.get("text"), *(delta.get(part) for part in DELTAS))
            carried = carried or any(parts)
        return carried

    def record(self, work: Work, arrived: float, finished: float, error: str = "") -> Record:
        """The record of the request once the stream has ended; an incomplete stream is an error."""
        try:
            self.read()
        except Exception as odd:  # one malformed response must not end the measurement
            self.error = self.error or f"an event that cannot be read: {type(odd).__name__}: {odd}"
        error = error or self.error
        if not error and not (self.done and self.finish_reason):
            error = "the stream ended without a finish_reason and [DONE]"
        output = self._output_tokens or self._token_ids or len(self.times)
        if not error and self._token_ids and output != self._token_ids:
            error = f"usage says {output} tokens, the stream carried {self._token_ids}"
        error = error or wrong_length(work, output)
        times = tuple(self.times)
        if not times and output and self._began is not None:
            times = (
                self._began,
            )  # no token decoded to text: the first chunk after the role marks the first token
        return Record(
            id=work.id,
            arrived=arrived,
            finished=finished,
            token_seconds=times,
            ended=self._ended,
            prompt_tokens=self._prompt_tokens,
            output_tokens=output,
            cached_tokens=self._cached_tokens,
            finish_reason=self.finish_reason,
            error=error,
            tenant=work.tenant,
            service_class=work.service_class,
        )


async def ask(
    connections: Connections,
    endpoint: Endpoint,
    work: Work,
    arrived: float,
    clock: Callable[[], float],
) -> Callable[[], Record]:
    """Sends one request; returns a function that makes its record, to be called after the measurement.

    Errors of the server are recorded, not raised.
    """
    answer = Answer()
    refusal: list[bytes] = []

    def receive(status: int, data: bytes) -> None:
        if status == 200:
            answer.feed(data, clock())
        else:
            refusal.append(data)

    path = urlsplit(endpoint.address(work)).path
    body = json.dumps(endpoint.body(work)).encode()
    try:
        async with asyncio.timeout(endpoint.timeout_seconds):
            status = await connections.post(path, endpoint.headers(work), body, receive)
    except Exception as error:  # one failed request must not end the others
        return partial(answer.record, work, arrived, clock(), f"{type(error).__name__}: {error}")
    why = b"".join(refusal).decode(errors="replace")[:500]
    return partial(answer.record, work, arrived, clock(), "" if status == 200 else f"HTTP {status}: {why}")
