"""The front end's side: answers that the owner of the engine gives, through one connection, and its own routes.

Every request that no route of the front end takes is sent on as it is (`Onward`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.auth.access import Access
from headrace.api.compile.call import Call
from headrace.api.compile.policies import About, PromptPolicy, Rules, SessionOf
from headrace.api.errors import failed, shutting_down
from headrace.api.exchange import EXCHANGE, Exchange
from headrace.api.fronts.messages import (
    Hello,
    Outbox,
    Refusal,
    SentExchange,
    SentSequence,
    ToFront,
    ToOwner,
    sent,
    sent_exchange,
)
from headrace.api.fronts.pictures import RemoteImages, dropped, numbered
from headrace.api.fronts.pooling import RemoteWorker
from headrace.api.models.relay import (
    Content,
    Lost,
    ModelClient,
    Relayed,
    Reply,
    forwarded_headers,
    has_body,
    target_of,
)
from headrace.api.routing import Endpoints, route
from headrace.api.serving import CallNotes, NotedCall
from headrace.core.events import Emitted, Event, Finished
from headrace.core.plan import new_tuple
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.response_cache.history import Recorded
from headrace.response_cache.lookup import NotCached
from headrace.response_cache.query import LookupRequest
from headrace.service.adapters import KnownAdapters, NamedAdapter
from headrace.service.answer import ALONE, Answer, Predicted, StreamPace
from headrace.service.packing import Frames, Plain, codec_of, packed, unpacked
from headrace.service.service import Refused

MOST_KEPT = 10_000
"""Most costs and quota headers that are kept."""

_EVENT = codec_of(Event)


class RemoteAnswer(Answer):
    """An answer of the owner. ``left`` are the sequences that have not ended."""

    __slots__ = ("call", "left", "number", "opened")

    def __init__(
        self, number: int, requests: Sequence[Request], interval: int, pace: StreamPace | None
    ) -> None:
        super().__init__(requests, interval, pace)
        self.number = number
        self.left = set(range(len(requests)))
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call: Call | None = None


class OwnerConnection(asyncio.Protocol):
    """`Lookups` of a front end, over the socket at ``path``. ``similar``: the owner has a semantic cache.

    When the owner has ended, this process ends too.
    """

    def __init__(self, path: str, similar: bool) -> None:
        self.now = time.monotonic
        self.pace = StreamPace(ALONE)
        self._path = path
        self._similar = similar
        self._stopped = False
        self._frames = Frames()
        self._numbers = itertools.count()
        self._answers: dict[int, RemoteAnswer] = {}
        self._costs: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._headers: OrderedDict[tuple[str, str], Mapping[str, str]] = OrderedDict()
        self._outbox: Outbox | None = None
        self.adapters = KnownAdapters()
        self.pooling = RemoteWorker(self._send)
        self.images: RemoteImages | None = None
        self.take_rules: Callable[[Rules], None] = lambda rules: None
        """Called with the rules in force, when the owner sends them."""
        self._listed = asyncio.Event()

    # -- the connection ---------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect on the running loop; then the adapters are known."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, self._path)
        await self._listed.wait()

    def stop(self) -> None:
        """Close the connection."""
        self._stopped = True
        if self._outbox is not None:
            self._outbox.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The owner has accepted."""
        self._outbox = Outbox(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        """The owner has ended: every call fails."""
        self._outbox = None
        self._listed.set()
        for answer in tuple(self._answers.values()):
            if not answer.opened.done():
                answer.opened.set_exception(shutting_down())
            self._end(answer, FinishReason.FAILED, "the server has ended")
        self.pooling.close()
        if self.images is not None:
            self.images.close()
        if not self._stopped:
            os.kill(os.getpid(), signal.SIGTERM)

    def data_received(self, data: bytes) -> None:
        """Messages of the owner."""
        self.pace.begin()
        for message in self._frames.feed(data):
            self._take(message)
        asyncio.get_running_loop().call_soon(self._written)

    def _written(self) -> None:
        asyncio.get_running_loop().call_soon(self.pace.end)

    def takes_images(self, part: Mapping[str, Any]) -> RemoteImages:
        """What places images through the owner, whose template takes ``part`` for each."""
        self.images = RemoteImages(part, self._send)
        return self.images

    def _send(self, message: Plain) -> None:
        if self._outbox is not None:
            self._outbox.send(message)

    def _take(self, message: Plain) -> None:
        match message:
            case (ToFront.EVENTS, calls):
                answers = self._answers
                for each in calls:
                    answer = answers.get(each[0])
                    if answer is None:
                        continue
                    if len(each) == 3:  # a token; the index says whose it is
                        answer.tell(each[1], new_tuple(Emitted, ("", each[2], ())))
                    else:
                        self._deliver(answer, each)
            case (ToFront.OPENED, number, note, headers):
                if (answer := self._answers.get(number)) is not None:
                    first = answer.requests[0]
                    answer.note = note
                    _keep(self._headers, (first.tenant, first.model), headers)
                    answer.opened.set_result(None)
            case (ToFront.REFUSED, number, refusal):
                if (answer := self._answers.pop(number, None)) is not None:
                    answer.opened.set_exception(_error(unpacked(Refusal, refusal)))
            case (ToFront.RULES, rules):
                self.take_rules(unpacked(Rules, rules))
            case (ToFront.ADAPTERS, adapters):
                self.adapters.put(NamedAdapter(*each) for each in adapters)
                self._listed.set()
                self._send((ToOwner.ADAPTERS,))
            case (ToFront.POOLED | ToFront.POOL_REFUSED, _, *_):
                self._take_pooled(message)
            case (ToFront.WANT | ToFront.PLACED | ToFront.NOT_PLACED, _, *_):
                if self.images is not None:
                    self.images.take(message)
            case (ToFront.ABORT, number):
                answer = self._answers.get(number)
                if answer is not None and answer.call is not None:
                    answer.call.abort()
                elif answer is not None:
                    self.close(answer)

    def _take_pooled(self, message: Plain) -> None:
        job = self.pooling.take(message)
        if job is not None and message[0] == ToFront.POOLED:
            *_, cost, headers = message
            _keep(self._headers, (job.tenant, job.model.name), headers)
            if cost is not None:
                _keep(self._costs, job.id, cost)

    def _deliver(self, answer: RemoteAnswer, sent: Plain) -> None:
        _, events, cached, predicted, cost = sent
        answer.cached_tokens[:] = cached
        answer.predicted[:] = [Predicted(*each) for each in predicted]
        if cost is not None:
            _keep(self._costs, answer.requests[0].id, cost)
        unpack = _EVENT.unpack
        assert unpack is not None
        for index, plain in events:
            event = unpack(plain)
            if type(event) is Finished:
                answer.left.discard(index)
            answer.tell(index, event)
        if not answer.left:
            self._forget(answer)

    # -- calls ------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """Announce a call whose body is being read."""
        self._send((ToOwner.EXPECT,))

    async def open(self, lookups: Sequence[LookupRequest], interval: int = 1, paced: bool = False) -> Answer:
        """Let the owner answer all sequences of one call, as `CacheLookup.open`.

        Raises:
            NotCached, Refused, InvalidParameter, ApiError: it does not.
        """
        if self._outbox is None:
            raise shutting_down()
        requests = [each.request for each in lookups]
        sequences = [self._sequence(each) for each in lookups]
        answer = RemoteAnswer(next(self._numbers), requests, interval, self.pace if paced else None)
        self._answers[answer.number] = answer
        self._send((ToOwner.OPEN, answer.number, sequences, interval, paced))
        try:
            await answer.opened
        except BaseException:
            self.close(answer)
            raise
        finally:
            dropped(requests)
        return answer

    def _sequence(self, lookup: LookupRequest) -> Plain:
        made = sent(lookup, self._similar)
        if (request := lookup.request).images:
            made = made._replace(request=replace(request, images=numbered(request.images)))
        return packed(SentSequence, made)

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        """End the open sequences of a call."""
        assert isinstance(answer, RemoteAnswer)
        if answer.number in self._answers:
            self._send((ToOwner.CLOSE, answer.number, why.value))
            self._end(answer, why)

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """A stop string ended one sequence."""
        assert isinstance(answer, RemoteAnswer)
        if answer.number in self._answers:
            self._send((ToOwner.STOP, answer.number, index))

    def _forget(self, answer: RemoteAnswer) -> None:
        """The owner sends nothing more of this answer; without a cycle, it is freed with its last reference."""
        self._answers.pop(answer.number, None)
        answer.call = None

    def _end(self, answer: RemoteAnswer, why: FinishReason, message: str = "") -> None:
        self._forget(answer)
        left, answer.left = answer.left, set()
        for index in sorted(left):
            request = answer.requests[index]
            answer.tell(index, Finished(request.id, why, len(request.tokens), 0, 0, message))

    # -- what else crosses ------------------------------------------------------------------------------

    def note(self, call: NotedCall, metadata: dict[str, str] | None) -> None:
        """Note the metadata of a call."""
        assert isinstance(call, Call)
        answer = call.answer
        if isinstance(answer, RemoteAnswer):
            if answer.number in self._answers:
                answer.call = call
            if metadata:
                self._send((ToOwner.NOTE, answer.number, call.tenant, call.request_ids, metadata))

    def named(self, exchange: Exchange) -> None:
        """A hook: an exchange has opened a call."""
        self._send((ToOwner.NAMED, packed(SentExchange, sent_exchange(exchange))))

    def ended(self, exchange: Exchange) -> None:
        """A hook: an exchange has ended; one that was relayed is the owner's."""
        if exchange.route != RELAYED:
            self._send((ToOwner.ENDED, packed(SentExchange, sent_exchange(exchange))))

    def asked(self, key: bytes, tenant: str, at: float, recorded: Recorded | None) -> None:
        """Let the owner's history record a request; see `History.asked`."""
        self._send((ToOwner.ASKED, key, tenant, at, None if recorded is None else tuple(recorded)))

    def cost(self, request_ids: Iterable[str]) -> Mapping[str, Any]:
        """The cost of a call that has ended; empty before."""
        return self._costs.get(next(iter(request_ids)), {})

    def headers(self, tenant: str, model: str) -> Mapping[str, str]:
        """The quota headers of a tenant's last call."""
        return self._headers.get((tenant, model), {})

    # -- what the runtime of the HTTP server asks -------------------------------------------------------

    @property
    def awaited(self) -> bool:
        """Whether a call is open."""
        return bool(self._answers or self.pooling.open_calls)

    def open_requests(self) -> int:
        """Number of open calls."""
        return len(self._answers) + self.pooling.open_calls

    async def drain(self, timeout: float) -> bool:
        """The owner has drained before."""
        return True

    def close_all(self) -> None:
        """Cancel every open call."""
        for answer in tuple(self._answers.values()):
            self.close(answer)


class Connecting:
    """Connects with the start of the application, and disconnects at its end."""

    def __init__(self, connection: OwnerConnection) -> None:
        self._connection = connection

    async def start(self) -> None:
        """Connect."""
        await self._connection.connect()

    async def stop(self) -> None:
        """Disconnect."""
        self._connection.stop()


async def read_hello(path: str) -> Hello:
    """What the owner at ``path`` says of the model.

    Raises:
        OSError: it has ended, or cannot describe the model.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    frames, messages = Frames(), list[Plain]()
    try:
        while not messages:
            received = await reader.read(1 << 16)
            if not received:
                raise ConnectionError("the server has ended")
            messages = frames.feed(received)
    finally:
        writer.close()
    kind, said = messages[0]
    if kind == ToFront.NO_HELLO:
        raise ConnectionError(f"the server cannot describe its model: {said}")
    return unpacked(Hello, said)


RELAYED = "/{path:path}"
"""The path of the route that sends requests on."""


class FrontNotes(CallNotes):
    """Notes that the owner keeps."""

    def __init__(self, owner: OwnerConnection) -> None:
        super().__init__()
        self._owner = owner

    def put(self, call: NotedCall, metadata: dict[str, str] | None) -> None:
        """Let the owner remember a call."""
        self._owner.note(call, metadata)


@dataclass(frozen=True, slots=True)
class FrontPrompts(PromptPolicy):
    """Prompts that the owner records: they cross with their sequences. ``retained``: so are those of sessions."""

    retained: bool = False

    @property
    def keeps_sessions(self) -> bool:
        """Whether the owner retains the prompts of sessions."""
        return self.retained

    def submit(self, request: Request, about: About, session: SessionOf | None) -> None:
        """The owner has recorded it."""


def _keep(kept: OrderedDict[Any, Any], key: object, value: object) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_KEPT:
        kept.popitem(last=False)


def _error(refusal: Refusal) -> Exception:
    if refusal.verdict is not None:
        return Refused(refusal.verdict, refusal.rooms)
    if refusal.param:
        return InvalidParameter(refusal.param, refusal.message)
    return failed() if refusal.message else NotCached()


class Onward(Endpoints):
    """Sends requests to the owner's socket at ``path``; ``open`` counts those that are being answered."""

    def __init__(self, path: str) -> None:
        self.open = 0
        self._client = ModelClient(path)

    @route("GET /{path:path}", Access.ANY_KEY)
    @route("POST /{path:path}", Access.ANY_KEY)
    @route("DELETE /{path:path}", Access.ANY_KEY)
    async def other(self, request: HttpRequest) -> Response:
        """The owner's response, with the trace context that the owner gave it."""
        request.scope[EXCHANGE].traceparent = ""
        body = None if has_body(request) else b""
        return Relayed(self, lambda content: self._send(request, content), body)

    async def _send(self, request: HttpRequest, content: Content) -> Reply:
        headers = forwarded_headers(request, request.scope[EXCHANGE].request_id, content, request.method)
        try:
            return await self._client.send(request.method, target_of(request), headers, content)
        except Lost:
            raise shutting_down() from None
