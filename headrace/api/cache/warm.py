"""``/v1/cache/warm``: computes requests and prompt prefixes into the caches ahead of time.

The same idle time compares pairs of requests for the semantic cache, with the served model (`PairComparison`).
"""

from __future__ import annotations

import math
import time
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import tenant
from headrace.api.body import parse, typed_body
from headrace.api.compile.bodies import CHAT, COMPLETIONS, AnyMessage, ChatBody, CompletionBody, Conversation
from headrace.api.compile.call import Call
from headrace.api.compile.encode import conversation_tokens
from headrace.api.compile.model import ServedModel
from headrace.api.compile.pictures import sent_images
from headrace.api.compile.submit import open_chat, open_completion
from headrace.api.errors import ApiError, invalid, permission_denied
from headrace.api.exchange import CALLER, Caller
from headrace.api.routing import Endpoints, route
from headrace.api.wire import NotYet, Wire
from headrace.core.constraint import json_text
from headrace.core.events import Emitted
from headrace.core.plan import TokenLogprob
from headrace.core.request import InvalidParameter, Request, Retention, SamplingParams
from headrace.core.tenancy.tenants import BACKGROUND
from headrace.response_cache.history import Recorded
from headrace.response_cache.rules.pairs import Pair, Verdicts
from headrace.response_cache.warmer import (
    ID_PREFIX,
    BackgroundRequests,
    Begun,
    Job,
    NotCacheable,
    Outcome,
    Warmer,
)
from headrace.service.service import Refused, Service

PATH = "/v1/cache/warm"
"""The path of the route, which also marks prefixes among recorded requests."""

NOT_YET: NotYet = {}

MAX_REQUESTS = 10_000
MAX_PREFIXES = 100


class WarmRequest(Wire):
    """A request to compute ahead, in the format of a batch file's line."""

    custom_id: str | None = None
    method: Literal["POST"] | None = None
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class WarmPrefix(Wire):
    """A prompt prefix to keep in the prefix cache: a text, or the first messages of conversations."""

    prompt: str | None = Field(None, min_length=1)
    messages: list[AnyMessage] | None = Field(None, min_length=1)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="The `cache_salt` of the later requests."
    )
    user: str | None = Field(None, max_length=512, description="The `user` of the later requests.")
    model: str | None = Field(
        None, description="The `model` of the later requests: the served model, or a LoRA adapter of it."
    )
    retention: int = Field(
        80,
        ge=0,
        le=100,
        description="Retention priority; blocks with a higher one are evicted later. Blocks without one have 35.",
    )


class WarmBody(Wire):
    """What to compute in idle time."""

    requests: list[WarmRequest] = Field(default=[], max_length=MAX_REQUESTS)
    prefixes: list[WarmPrefix] = Field(default=[], max_length=MAX_PREFIXES)
    from_history: bool = Field(
        False, description="Also compute the best candidates of the request history (admin keys only)."
    )


class Computing:
    """Computes recorded requests into the caches, for `response_cache.warmer`; compares pairs for ``verdicts``."""

    def __init__(
        self,
        ahead: BackgroundRequests,
        service: Service,
        model: ServedModel,
        request_timeout: float,
        verdicts: Verdicts | None = None,
    ) -> None:
        self._ahead = ahead
        self._service = service
        self._model = model
        self._request_timeout = request_timeout
        self._prefixes = 0
        self._pairs = PairComparison(service, model)
        self._verdicts = verdicts

    async def compute(self, job: Job, begun: Begun) -> Outcome:
        """Compute one request or one prefix, or compare a pair.

        If a request is cancelled, its beginning is stored and resumed later.
        """
        if isinstance(job, Pair):
            return await self._judge(job, begun)
        caller = Caller(job.key_id, job.tenant_header)
        try:
            if job.url == PATH:
                return await self._prefill(parse(job.body, WarmPrefix, NOT_YET), caller, begun)
            call = await self.open(job, caller)
            begun()
            try:
                while not call.done:
                    await call.advance()
            finally:
                call.close()
            return Outcome(call.cache_note)
        except (ApiError, InvalidParameter, NotCacheable, Refused):
            return Outcome.REFUSED

    async def _judge(self, pair: Pair, begun: Begun) -> Outcome:
        assert self._verdicts is not None  # pairs come from there
        try:
            same = await self._pairs.same(pair, begun)
        except (ApiError, InvalidParameter, Refused):
            same = None
        if same is None:
            return Outcome.REFUSED
        self._verdicts.settle(pair, same)
        return Outcome.COMPUTED

    async def open(self, recorded: Recorded, caller: Caller) -> Call:
        """Open the call of a recorded request.

        Raises:
            ApiError: this server would reject it.
            NotCacheable: its response could not be cached.
        """
        if recorded.url == "/v1/completions":
            body = parse(recorded.body, CompletionBody, COMPLETIONS)
            return await open_completion(self._ahead, self._model, body, caller, self._request_timeout)
        chat = parse(recorded.body, ChatBody, CHAT)
        return await open_chat(self._ahead, self._model, chat, caller, self._request_timeout, shorten=True)

    async def prefix_tokens(self, prefix: WarmPrefix, tenant_name: str) -> list[int]:
        """The tokens of a prefix of a tenant.

        Raises:
            ApiError: the prefix has not exactly one of prompt and messages, cannot be rendered, is too long, or names a
                model that is not there.
        """
        self._model.check_name(prefix.model)
        if (prefix.prompt is None) == (prefix.messages is None):
            raise invalid("a prefix needs either a prompt or messages")
        if prefix.prompt is not None:
            tokens = await self._model.encode(prefix.prompt, add_special_tokens=True)
        else:
            opening = Conversation.model_construct(messages=prefix.messages, add_generation_prompt=False)
            if sent_images(opening):
                raise invalid("messages: a prefix with images cannot be computed ahead", "messages")
            tokens = await conversation_tokens(self._model, opening, tenant_name)
        self._model.check_text(tokens, None)
        if len(tokens) >= self._model.max_model_len:
            raise invalid(
                f"a prefix of {len(tokens)} tokens leaves no room within --max-model-len {self._model.max_model_len}"
            )
        return tokens

    async def _prefill(self, prefix: WarmPrefix, caller: Caller, begun: Begun) -> Outcome:
        tenant_name = tenant(caller.key_id, caller.tenant_header, prefix.user)
        tokens, named = await self.prefix_tokens(prefix, tenant_name), self._model.named(prefix.model)
        self._prefixes += 1
        request = Request(
            id=f"{ID_PREFIX}prefix-{self._prefixes}",
            tokens=tuple(tokens),
            params=SamplingParams(temperature=0.0, max_tokens=1),
            arrived=self._service.now(),
            tenant=tenant_name,
            service_class=BACKGROUND.name,
            model=named.name,
            adapter=named.adapter,
            salt=f"{tenant_name}\0{prefix.cache_salt or ''}",
            retention=(Retention(0, None, prefix.retention),),
        )
        answer = self._service.open([request], interval=0)
        begun()
        try:
            await answer.read()
        finally:
            self._service.close(answer)
        return Outcome.KEPT if answer.cached_tokens[0] >= len(tokens) - 1 else Outcome.COMPUTED


class Warm(Endpoints):
    """The endpoint. ``max_body_bytes`` limits request bodies."""

    def __init__(
        self, warmer: Warmer, computing: Computing, model: ServedModel, *, max_body_bytes: int
    ) -> None:
        self._warmer = warmer
        self._computing = computing
        self._model = model
        self._max_body_bytes = max_body_bytes

    @route(
        "POST /v1/cache/warm",
        Access.INFERENCE,
        "Compute responses and prompt prefixes into the caches during idle time.",
        body=WarmBody,
        example={"prefixes": [{"messages": [{"role": "system", "content": "You are brief."}]}]},
    )
    async def warm(self, request: HttpRequest) -> Response:
        """Compute responses and prompt prefixes in idle time.

        Responses are computed for the request's own tenant and served to no other.
        """
        body = await typed_body(request, self._max_body_bytes, WarmBody, NOT_YET)
        caller: Caller = request.scope[CALLER]
        if body.from_history and caller.key_id is not None:
            message = "from_history computes recorded requests of every tenant and needs an admin key"
            raise permission_denied(message, "from_history")
        requests = []
        for number, each in enumerate(body.requests):
            raw = json_text(each.body, "the body").encode("utf-8", "surrogatepass")
            self._check(each.url, raw, f"requests[{number}].body")
            requests.append(Recorded(each.url, caller.key_id, caller.tenant_header, raw))
        for number, prefix in enumerate(body.prefixes):
            tenant_name = tenant(caller.key_id, caller.tenant_header, prefix.user)
            try:
                await self._computing.prefix_tokens(prefix, tenant_name)
            except ApiError as error:
                raise _within(error, f"prefixes[{number}]") from None
        for prefix in body.prefixes:
            tenant_name = tenant(caller.key_id, caller.tenant_header, prefix.user)
            raw = prefix.model_dump_json(exclude_none=True).encode()
            await self._warmer.keep_warm(
                tenant_name,
                Recorded(PATH, caller.key_id, caller.tenant_header, raw),
            )
        taken = self._warmer.add(requests)
        found = await self._warmer.refill() if body.from_history else 0
        return JSONResponse(
            {"requests": taken, "prefixes": len(body.prefixes), "from_history": found}, status_code=202
        )

    @route("GET /v1/cache/warm", Access.INFERENCE, "Report the progress of cache warming.")
    async def state(self, request: HttpRequest) -> Response:
        """The progress of cache warming."""
        return JSONResponse(self._warmer.state()._asdict() | {"at": time.time()})

    def _check(self, url: str, raw: bytes, param: str) -> None:
        """Reject a request that could not be parsed later."""
        form = (CompletionBody, COMPLETIONS) if url == "/v1/completions" else (ChatBody, CHAT)
        try:
            self._model.check_name(parse(raw, *form).model)
        except ApiError as error:
            raise _within(error, param) from None


def _within(error: ApiError, place: str) -> ApiError:
    """400: an error of the request or prefix at ``place`` in the body."""
    return invalid(f"{place}: {error}", f"{place}.{error.param}" if error.param else place)


PROMPT = """Two users send a message each to the same assistant. Would one answer be complete and correct for both? \
Say No if the messages differ in a number, a date, a name, a place, a person, an amount, a direction or an order, \
if one negates or narrows the other, or if they ask for different things. Say Yes only if they mean the same.

Message 1: How do I turn on the heating?
Message 2: How do I turn off the heating?
Answer: No

Message 1: How do I reset my password?
Message 2: What is the way to reset my password?
Answer: Yes

Message 1: Is the shop open on Friday?
Message 2: Is the shop open on Monday?
Answer: No

Message 1: {one}
Message 2: {other}
Answer Yes or No."""

LEAST_ODDS = math.log(0.7 / 0.3)
"""The log-odds of Yes over No from which on a pair counts as the same, in the order in which they are lower."""

_TOP = 20
"""Alternatives in which the other of the two tokens is looked for; if it is not among them, it is at most as likely."""


class PairComparison:
    """Compares two requests on ``service``, with prompts for ``model``: whether one answer is right for both.

    A prompt with both, in both orders, and one token that may only begin Yes or No. The log-probabilities of the two
    decide. The request has the background class, and belongs to the tenant whose requests it compares.
    """

    def __init__(self, service: Service, model: ServedModel) -> None:
        self._service = service
        self._model = model
        self._asked = 0

    async def same(self, pair: Pair, begun: Begun) -> bool | None:
        """Whether one answer is right for both; None if the model could not be asked. A pair too long for it is not.

        Raises:
            ApiError: the prompt cannot be rendered.
            Refused: the server or the tenant's quota takes no more requests.
        """
        yes, no = [(await self._model.encode(word, add_special_tokens=False))[0] for word in ("Yes", "No")]
        least = math.inf
        for one, other in ((pair.cached, pair.asked), (pair.asked, pair.cached)):
            tokens = await self._prompt(one, other, pair.tenant)
            if len(tokens) >= self._model.max_model_len:
                return False
            odds = await self._odds(tokens, yes, no, pair.tenant, begun)
            if odds is None:
                return None
            least = min(least, odds)
        return least >= LEAST_ODDS

    async def _prompt(self, one: str, other: str, tenant_name: str) -> list[int]:
        said = PROMPT.format(one=_line(one), other=_line(other))
        asked = Conversation.model_validate(
            {"messages": [{"role": "user", "content": said}], "reasoning_effort": "none"}
        )
        return await conversation_tokens(self._model, asked, tenant_name)

    async def _odds(
        self, tokens: list[int], yes: int, no: int, tenant_name: str, begun: Begun
    ) -> float | None:
        """The log-odds of ``yes`` over ``no`` after a prompt; None if nothing was computed."""
        self._asked += 1
        request = Request(
            id=f"{ID_PREFIX}pair-{self._asked}",
            tokens=tuple(tokens),
            params=SamplingParams(
                temperature=0.0, max_tokens=1, allowed_token_ids=(yes, no), logprobs=_TOP, ignore_eos=True
            ),
            arrived=self._service.now(),
            tenant=tenant_name,
            service_class=BACKGROUND.name,
            salt=f"{tenant_name}\0",
            indexed=False,
        )
        answer = self._service.open([request], interval=0)
        begun()
        try:
            events = await answer.read()
        finally:
            self._service.close(answer)
        found = [event.logprobs[0] for _, event in events if isinstance(event, Emitted) and event.logprobs]
        return _log_odds(found[0], yes, no) if found else None


def _log_odds(found: TokenLogprob, yes: int, no: int) -> float:
    """The log-odds of two tokens, one of which was chosen; the other is no likelier than the least alternative."""
    known = dict(found.top) | {found.token: found.logprob}
    other = no if found.token == yes else yes
    bound = min((logprob for _, logprob in found.top), default=found.logprob)
    odds = found.logprob - known.get(other, min(bound, found.logprob))
    return odds if found.token == yes else -odds


def _line(text: str) -> str:
    """A message in one line, so that it cannot look like another part of the prompt."""
    return " ".join(text.split())
