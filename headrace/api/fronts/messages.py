"""What crosses between a front end and the owner: a looked up sequence, a rejection, the end of an HTTP exchange.

`service.packing` makes bytes of these values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.api.compile.call import Prompt, Prompted
from headrace.api.compile.model import ServedModel
from headrace.api.compile.policies import About, Rules, SessionOf
from headrace.api.compile.submit import text_stream
from headrace.api.exchange import AnsweredCall, Exchange
from headrace.core.request import Request
from headrace.core.tenancy.gate import Reject
from headrace.core.tenancy.quota import Limit, Room
from headrace.response_cache.query import LookupRequest, Turn
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.service.packing import Plain, frame
from headrace.text.parsing.catalogue import PLAIN_JSON, REASONING_FORMATS, TOOL_FORMATS
from headrace.text.parsing.machine import Reading


class ToOwner:
    """The first field of a front end's message.

    ``ADAPTERS``: it knows those that the owner has sent. ``ASKED``: a request for the history. ``POOL``: a call of
    embeddings or scores; ``POOL_END``: the call has ended before an answer. ``PLACE``, ``FILE`` and ``DROP``: see
    `pictures`.
    """

    OPEN = 0
    CLOSE = 1
    STOP = 2
    NOTE = 3
    EXPECT = 4
    NAMED = 5
    ENDED = 6
    ADAPTERS = 7
    ASKED = 8
    POOL = 9
    POOL_END = 10
    PLACE = 11
    FILE = 12
    DROP = 13


class ToFront:
    """The first field of the owner's message.

    ``HELLO`` describes the model, and comes first, before ``ADAPTERS``; ``NO_HELLO`` says why it cannot. ``RULES`` are
    those in force, now and after each reload that the owner has taken over.
    """

    HELLO = 0
    OPENED = 1
    REFUSED = 2
    EVENTS = 3
    ABORT = 4
    ADAPTERS = 5
    POOLED = 6
    POOL_REFUSED = 7
    WANT = 8
    PLACED = 9
    NOT_PLACED = 10
    NO_HELLO = 11
    RULES = 12


class Outbox:
    """What one process sends to the other. Messages of one iteration of the loop are one write: a write takes as long
    as making the messages of a call, and wakes the other process.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting: list[bytes] = []

    def send(self, message: Plain) -> None:
        """Send a message, in the next iteration of the loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(frame(message))

    def flush(self) -> None:
        """Send all messages that wait."""
        if self._waiting and not self._transport.is_closing():
            self._transport.write(b"".join(self._waiting))
        self._waiting.clear()

    def close(self) -> None:
        """Send all messages that wait, and close the connection."""
        self.flush()
        self._transport.close()


class SentText(NamedTuple):
    """What a front end must know of the model that generates text.

    ``rules`` are those in force, which the files of the options may no longer say. ``image_part`` is what its template
    takes for an image; None: it takes none, ``no_images`` says why.
    """

    rules: Rules
    max_model_len: int
    vocab_size: int
    keeps_sessions: bool
    image_part: Any
    no_images: str


class SentModel(NamedTuple):
    """A model of embeddings or scores; its ``tokenizer`` as JSON. Scores have no dimensions and no prompts."""

    name: str
    tokenizer: str
    lower_case: bool
    vocab_size: int
    max_tokens: int
    batch_tokens: int
    unit_tokens: int
    dimensions: int = 0
    normalize: bool = False
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None


class SentPooling(NamedTuple):
    """The models of embeddings and scores, as `PoolingModels` has them."""

    embedding: SentModel | None = None
    rerank: SentModel | None = None
    also_named: Mapping[str, tuple[str, ...]] = {}


class Hello(NamedTuple):
    """What a front end must know of the server. ``text`` is None if the server does not generate.

    ``costs``: the server has prices; ``similar``: it has a semantic cache.
    """

    text: SentText | None
    pooling: SentPooling
    costs: bool
    similar: bool


class SentReading(NamedTuple):
    """A `Reading`, with its formats by name."""

    tools: str | None
    reasoning: str | None
    opened: bool
    schemas: Any
    limited: bool
    parallel: bool


class SentSequence(NamedTuple):
    """A `LookupRequest`. ``ends_by_text`` and ``reading`` make its text stream; the rest describes its prompt."""

    request: Request
    control: CacheDirectives
    continues: bool
    ends_by_text: bool
    reading: SentReading | None
    turn: Turn | None
    bars: str
    origin: bytes
    first: bool
    session: SessionOf | None
    tools: tuple[int, ...]
    normalized: tuple[dict[str, Any], ...]


def sent(lookup: LookupRequest, similar: bool) -> SentSequence:
    """A sequence as the owner gets it; its last user message is found only for ``similar`` requests."""
    prompted = lookup.prompted
    assert isinstance(prompted, Prompted)
    prompt = prompted.prompt
    return SentSequence(
        lookup.request,
        lookup.control,
        lookup.continues,
        lookup.stops is not None,
        _sent_reading(prompt.reading),
        lookup.turn() if similar else None,
        lookup.bars,
        lookup.origin,
        prompted.first,
        prompted.session,
        prompt.about.tools,
        prompt.about.normalized,
    )


def received(sent: SentSequence, model: ServedModel) -> LookupRequest:
    """The sequence that a front end sent."""
    request = sent.request
    about = About(tools=sent.tools, normalized=sent.normalized)
    prompt = Prompt(
        request.tokens, request.params, sent.continues, reading=_reading(sent.reading), about=about
    )
    return LookupRequest(
        request,
        sent.control,
        sent.continues,
        (lambda: text_stream(model, prompt)) if sent.ends_by_text else None,
        lambda: sent.turn,
        sent.bars,
        sent.origin,
        Prompted(prompt, sent.session, sent.first),
    )


def _sent_reading(reading: Reading | None) -> SentReading | None:
    if reading is None:
        return None
    tools, reasoning = reading.tools, reading.reasoning
    return SentReading(
        None if tools is None else tools.name,
        None if reasoning is None else reasoning.name,
        reading.opened,
        dict(reading.schemas),
        reading.limited,
        reading.parallel,
    )


_TOOLS = {each.name: each for each in (*TOOL_FORMATS, PLAIN_JSON)}
_REASONING = {each.name: each for each in REASONING_FORMATS}


def _reading(sent: SentReading | None) -> Reading | None:
    if sent is None:
        return None
    return Reading(
        None if sent.tools is None else _TOOLS[sent.tools],
        None if sent.reasoning is None else _REASONING[sent.reasoning],
        opened=sent.opened,
        schemas=sent.schemas,
        limited=sent.limited,
        parallel=sent.parallel,
    )


class Refusal(NamedTuple):
    """Why a call was not opened: rejected, not cached (``verdict`` None, no ``param``), or a wrong parameter."""

    verdict: Reject | None = None
    rooms: Mapping[Limit, Room] = {}
    param: str = ""
    message: str = ""


class SentCall(NamedTuple):
    """The call of an HTTP exchange that has ended; see `exchange.AnsweredCall`."""

    stream: bool
    cache_note: str
    first_token_at: float | None
    finish_reasons: list[str]
    service_class: str
    used: dict[str, Any]


class SentExchange(NamedTuple):
    """An HTTP exchange: its fields of the same names."""

    method: str
    path: str
    request_id: str
    route: str
    began: float
    ended: float
    status: int
    received_bytes: int
    sent_bytes: int
    error: str
    tenant: str
    model: str
    call_id: str
    request_ids: tuple[str, ...]
    traceparent: str
    parent_id: str | None
    call: SentCall | None = None


def sent_exchange(exchange: Exchange) -> SentExchange:
    """An exchange as the owner gets it."""
    fields = {name: getattr(exchange, name) for name in SentExchange._fields if name != "call"}
    return SentExchange(**fields, call=None if exchange.call is None else _sent_call(exchange.call))


def _sent_call(call: AnsweredCall) -> SentCall:
    return SentCall(
        call.stream,
        call.cache_note,
        call.first_token_at,
        call.finish_reasons,
        call.service_class,
        call.tokens(),
    )
