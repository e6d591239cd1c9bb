"""The owner's side: opens the calls of front ends as those of its own doors, and sends their events.

One message to each front end has the events of a step of all its calls. While a front end reads late, events wait in
their answers, so that a later message has more tokens for each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from starlette.datastructures import Headers

from headrace.api.compile.call import Prompted
from headrace.api.compile.model import ServedModel
from headrace.api.compile.policies import Rules
from headrace.api.exchange import Exchange, Hooks
from headrace.api.fronts.messages import (
    Hello,
    Outbox,
    Refusal,
    SentCall,
    SentExchange,
    SentPooling,
    SentSequence,
    SentText,
    ToFront,
    ToOwner,
    received,
)
from headrace.api.fronts.pictures import FrontPictures
from headrace.api.fronts.pooling import FrontJobs, OwnedPooling
from headrace.api.serving import CallNotes
from headrace.core.events import Emitted, Event
from headrace.core.request import FinishReason, InvalidParameter
from headrace.response_cache.history import History, Recorded
from headrace.response_cache.lookup import CacheLookup, NotCached
from headrace.response_cache.query import LookupRequest
from headrace.service.adapters import AdapterNames, NamedAdapter
from headrace.service.answer import Answer
from headrace.service.packing import Frames, Plain, codec_of, packed, unpacked
from headrace.service.service import Refused

logger = logging.getLogger(__name__)

ADAPTERS_SECONDS = 10.0
"""How long loading or unloading an adapter waits until front ends know it."""

_EVENT = codec_of(Event)


class FrontCall:
    """One call of a front end. ``answer`` is None until it is opened; ``closed`` says why it was closed before."""

    def __init__(
        self, connection: FrontConnection, number: int, tenant: str, request_ids: Sequence[str]
    ) -> None:
        self.id = request_ids[0].rpartition("-")[0] if len(request_ids) > 1 else request_ids[0]
        self.tenant = tenant
        self.request_ids = tuple(request_ids)
        self.number = number
        self.answer: Answer | None = None
        self.closed: FinishReason | None = None
        self.begun = False
        self._connection = connection

    @property
    def settled(self) -> bool:
        """Whether it has ended."""
        return self.answer is None or self.answer.settled

    def abort(self) -> None:
        """End it with the error of an aborted request."""
        self._connection.abort(self)

    def wake(self) -> None:
        """Its events are due."""
        self._connection.send_soon(self)


class Owner:
    """What front ends need of the server: the caches before the engine, the notes of calls, hooks, quotas and costs."""

    def __init__(
        self,
        lookup: CacheLookup,
        model: ServedModel | None,
        notes: CallNotes,
        headers: Callable[[str, str], Mapping[str, str]],
        hooks: Hooks,
        similar: bool,
        history: History | None = None,
        pooling: OwnedPooling | None = None,
    ) -> None:
        self.history = history
        self.pooling = pooling
        self.lookup = lookup
        self.model = model
        self.notes = notes
        self.headers = headers
        self.hooks = hooks
        self.connections: set[FrontConnection] = set()
        if model is not None and isinstance(model.adapters, AdapterNames):
            model.adapters.when_changed = self._send_adapters
        other = None if pooling is None else pooling.cost
        self._cost = other if model is None else model.cost
        self._similar = similar
        self._sent = SentPooling() if pooling is None else pooling.sent()

    @property
    def has_costs(self) -> bool:
        """Whether the server has prices."""
        return self._cost is not None

    def hello(self) -> Hello:
        """What a front end that connects now must know."""
        text, model = None, self.model
        if model is not None:
            part = None if model.images is None else dict(model.images.part())
            limits = model.max_model_len, model.vocab_size
            text = SentText(model.rules, *limits, model.prompts.keeps_sessions, part, model.no_images)
        return Hello(text, self._sent, self.has_costs, self._similar)

    @property
    def adapters(self) -> Sequence[NamedAdapter]:
        """The adapters of the model."""
        return () if self.model is None else [*(self.model.adapters or ())]

    def connect(self) -> FrontConnection:
        """A new front end connects."""
        return FrontConnection(self)

    def send_rules(self) -> None:
        """The server has taken over other rules: send them to all front ends."""
        for each in self.connections:
            each.send_rules()

    async def _send_adapters(self) -> None:
        """Send the adapters to all front ends, so that the next request may go to any of them."""
        confirmed = [each.send_adapters() for each in self.connections]
        late = (await asyncio.wait(confirmed, timeout=ADAPTERS_SECONDS))[1] if confirmed else ()
        if late:
            logger.warning("%d front ends do not answer; they may not know the LoRA adapters yet", len(late))

    def cost(self, request_ids: Iterable[str]) -> Mapping[str, Any]:
        """The cost of requests; empty without prices."""
        return {} if self._cost is None else self._cost(request_ids)


class FrontConnection(asyncio.Protocol):
    """The connection of one front end. When it ends, its calls are cancelled."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._frames = Frames()
        self._calls: dict[int, FrontCall] = {}
        self._due: list[FrontCall] = []
        self._scheduled = False
        self._paused = False
        self._outbox: Outbox | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unconfirmed: deque[asyncio.Future[None]] = deque()
        pooling = owner.pooling
        self._pooling = None if pooling is None else FrontJobs(pooling, self._send, owner.headers)
        self._images = None if owner.model is None else FrontPictures(owner.model, self._send)

    # -- the connection ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Describe the model and its adapters."""
        self._outbox = Outbox(cast(asyncio.Transport, transport))
        try:
            hello = packed(Hello, self._owner.hello())
        except Exception as error:  # the front end would wait for ever
            logger.exception("the model cannot be described to a front end")
            self._send((ToFront.NO_HELLO, repr(error)))
            self._outbox.close()
            return
        self._owner.connections.add(self)
        self._send((ToFront.HELLO, hello))
        self.send_rules()
        self.send_adapters()

    def connection_lost(self, exc: Exception | None) -> None:
        """The front end has ended: end its calls."""
        self._outbox = None
        self._owner.connections.discard(self)
        while self._unconfirmed:
            self._unconfirmed.popleft().set_result(None)
        for call in tuple(self._calls.values()):
            self._close(call, FinishReason.CANCELLED)
        for each in (self._pooling, self._images):
            if each is not None:
                each.close()

    def send_rules(self) -> None:
        """Send the rules in force."""
        if self._owner.model is not None:
            self._send((ToFront.RULES, packed(Rules, self._owner.model.rules)))

    def send_adapters(self) -> asyncio.Future[None]:
        """Send the adapters; the result is there when the front end knows them, or has ended."""
        self._unconfirmed.append(asyncio.get_running_loop().create_future())
        self._send((ToFront.ADAPTERS, [tuple(each) for each in self._owner.adapters]))
        return self._unconfirmed[-1]

    def pause_writing(self) -> None:
        """The front end reads late."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._paused = False
        self._schedule()

    def data_received(self, data: bytes) -> None:
        """Messages of the front end."""
        for message in self._frames.feed(data):
            self._take(message)

    @property
    def open_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls) + (0 if self._pooling is None else self._pooling.open_calls)

    def _take(self, message: Plain) -> None:
        owner = self._owner
        match message:
            case (ToOwner.OPEN, number, sequences, interval, paced):
                self._open(number, sequences, interval, paced)
            case (ToOwner.CLOSE, number, why):
                if (call := self._calls.get(number)) is not None:
                    self._close(call, FinishReason(why))
            case (ToOwner.STOP, number, index):
                call = self._calls.get(number)
                if call is not None and call.answer is not None:
                    owner.lookup.stop_sequence(call.answer, index)
            case (ToOwner.NOTE, number, tenant, request_ids, metadata):
                call = self._calls.get(number) or FrontCall(self, number, tenant, request_ids)
                owner.notes.put(call, metadata)
            case (ToOwner.ADAPTERS,):
                self._unconfirmed.popleft().set_result(None)
            case (ToOwner.POOL | ToOwner.POOL_END, _, _):
                if self._pooling is not None:
                    self._pooling.take(message)
            case (ToOwner.PLACE | ToOwner.FILE | ToOwner.DROP, _, *_):
                if self._images is not None:
                    self._images.take(message)
            case (ToOwner.ASKED, key, tenant, at, recorded):
                if owner.history is not None:
                    owner.history.asked(key, tenant, at, None if recorded is None else Recorded(*recorded))
            case (ToOwner.EXPECT,):
                owner.lookup.expect()
            case (ToOwner.NAMED, exchange):
                made = self._exchange(unpacked(SentExchange, exchange))
                for hook in owner.hooks.opened:
                    hook(made)
            case (ToOwner.ENDED, exchange):
                made = self._exchange(unpacked(SentExchange, exchange))
                for hook in owner.hooks.ended:
                    hook(made)

    # -- calls ------------------------------------------------------------------------------------------

    def _open(self, number: int, sequences: Sequence[Plain], interval: int, paced: bool) -> None:
        model = self._owner.model
        assert model is not None
        lookups = [self._lookup(unpacked(SentSequence, each), model) for each in sequences]
        call = FrontCall(self, number, lookups[0].request.tenant, [each.request.id for each in lookups])
        self._calls[number] = call
        task = asyncio.get_running_loop().create_task(self._answer(call, lookups, interval, paced))
        self._tasks.add(task)
        task.add_done_callback(partial(self._answered, call))

    def _lookup(self, sent: SentSequence, model: ServedModel) -> LookupRequest:
        if sent.request.images and self._images is not None:
            images = self._images.restored(sent.request.images)
            sent = sent._replace(request=replace(sent.request, images=images))
        return received(sent, model)

    def _answered(self, call: FrontCall, task: asyncio.Task[None]) -> None:
        """A call was opened or refused, or that has failed: its front end never waits for an answer in vain."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("call failed", exc_info=error, extra={"fields": {"id": call.id}})
        if call.number in self._calls:
            self._close(call, FinishReason.CANCELLED)
            self._send((ToFront.REFUSED, call.number, packed(Refusal, Refusal(message="failed"))))

    async def _answer(
        self, call: FrontCall, lookups: Sequence[LookupRequest], interval: int, paced: bool
    ) -> None:
        owner, model, refusal = self._owner, self._owner.model, Refusal()
        assert model is not None
        try:
            answer = await owner.lookup.open(lookups, interval=interval, paced=paced)
        except NotCached:
            pass
        except Refused as refused:
            refusal = Refusal(refused.verdict, refused.rooms)
        except InvalidParameter as error:
            refusal = Refusal(param=error.param, message=str(error))
        else:
            for each in lookups:
                if isinstance(each.prompted, Prompted) and each.prompted.first:
                    model.prompts.submit(each.request, each.prompted.prompt.about, each.prompted.session)
            call.answer = answer
            if call.closed is not None:
                owner.lookup.close(answer, call.closed)
                return
            owner.notes.put(call, None)
            headers = dict(owner.headers(call.tenant, lookups[0].request.model))
            self._send((ToFront.OPENED, call.number, answer.note, headers))
            answer.wakes(call)
            return
        if self._calls.pop(call.number, None) is not None:
            self._send((ToFront.REFUSED, call.number, packed(Refusal, refusal)))

    def _close(self, call: FrontCall, why: FinishReason) -> None:
        """End a call that the front end reads no more."""
        self._calls.pop(call.number, None)
        call.closed = why
        if call.answer is not None:
            self._owner.lookup.close(call.answer, why)

    def abort(self, call: FrontCall) -> None:
        """Let the front end end a call with the error of an aborted request."""
        self._send((ToFront.ABORT, call.number))
        self._close(call, FinishReason.CANCELLED)

    # -- events -----------------------------------------------------------------------------------------

    def send_soon(self, call: FrontCall) -> None:
        """Send the events of a call with those of the others, in the next iteration of the loop."""
        self._due.append(call)
        self._schedule()

    def _schedule(self) -> None:
        if self._due and not self._scheduled and not self._paused:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._paused:
            return
        due, self._due = self._due, []
        sent: list[Plain] = []
        for call in due:
            answer = call.answer
            if call.closed is not None or answer is None:
                continue
            events = answer.take()
            ended = answer.settled
            if len(events) == 1 and not ended:
                index, event = events[0]
                if type(event) is Emitted and not event.logprobs and call.begun:
                    sent.append((call.number, index, event.tokens))
                    continue
            sent.append(self._whole(call, answer, events, ended))
            if ended:
                self._close(call, FinishReason.CANCELLED)
        if sent:
            self._send((ToFront.EVENTS, sent))
            if self._outbox is not None:
                self._outbox.flush()

    def _whole(self, call: FrontCall, answer: Answer, events: Sequence[Any], ended: bool) -> Plain:
        pack = _EVENT.pack
        assert pack is not None
        call.begun = True
        cost = dict(self._owner.cost(call.request_ids)) if ended and self._owner.has_costs else None
        predicted = [tuple(each) for each in answer.predicted]
        plain = [(index, pack(event)) for index, event in events]
        return call.number, plain, list(answer.cached_tokens), predicted, cost

    def _send(self, message: Plain) -> None:
        if self._outbox is not None:
            self._outbox.send(message)

    def _exchange(self, sent: SentExchange) -> Exchange:
        scope = {"method": sent.method, "path": sent.path}
        made = Exchange(scope, Headers({}), sent.began, self._owner.hooks)
        for name in SentExchange._fields:
            setattr(made, name, getattr(sent, name))
        made.call = None if sent.call is None else OwnedCall(sent.call, sent.request_ids, self._owner)
        return made


class OwnedCall:
    """The call of a front end's exchange, for the access log; see `exchange.AnsweredCall`."""

    def __init__(self, sent: SentCall, request_ids: Sequence[str], owner: Owner) -> None:
        self.stream = sent.stream
        self.cache_note = sent.cache_note
        self.first_token_at = sent.first_token_at
        self.finish_reasons = sent.finish_reasons
        self.service_class = sent.service_class
        self._used = sent.used
        self._request_ids = request_ids
        self._owner = owner

    def cost(self) -> Mapping[str, Any]:
        """The cost of the call; empty if the engine had no request of it, as of embeddings."""
        return self._owner.cost(self._request_ids) if self._request_ids else {}

    def tokens(self) -> dict[str, Any]:
        """The tokens of the call."""
        return self._used
