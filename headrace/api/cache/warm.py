"""``/v1/cache/warm``: computes requests and prompt prefixes into the caches ahead of time."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.api.auth.api_keys import tenant
from headrace.api.body import read_body
from headrace.api.cache.pair_comparison import PairComparison
from headrace.api.cache.warm_wire import WarmBody, WarmPrefix
from headrace.api.caller import CALLER, Caller
from headrace.api.compile.bodies import CHAT, COMPLETIONS, ChatBody, CompletionBody, Conversation
from headrace.api.compile.call import Call
from headrace.api.compile.encode import conversation_tokens
from headrace.api.compile.model import ServedModel
from headrace.api.compile.stages import open_chat, open_completion
from headrace.api.errors import ApiError, invalid, permission_denied
from headrace.api.wire import NotYet, parse, parse_beside
from headrace.core.constraint import json_text
from headrace.core.request import InvalidParameter, Request, Retention, SamplingParams
from headrace.core.tenancy.classes import BACKGROUND
from headrace.response_cache.history import Recorded
from headrace.response_cache.rules.verdicts import Pair, Verdicts
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

    async def compute(self, question: Job, begun: Begun) -> Outcome:
        """Compute one request or one prefix, or compare a pair.

        If a request is cancelled, its beginning is stored and resumed later.
        """
        if isinstance(question, Pair):
            return await self._judge(question, begun)
        caller = Caller(question.key_id, question.tenant_header)
        try:
            if question.url == PATH:
                return await self._prefill(parse(question.body, WarmPrefix, NOT_YET), caller, begun)
            call = await self.open(question, caller)
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

    async def open(self, question: Recorded, caller: Caller) -> Call:
        """Open the call of a recorded request.

        Raises:
            ApiError: this server would reject it.
            NotCacheable: its response could not be cached.
        """
        if question.url == "/v1/completions":
            body = parse(question.body, CompletionBody, COMPLETIONS)
            return await open_completion(self._ahead, self._model, body, caller, self._request_timeout)
        chat = parse(question.body, ChatBody, CHAT)
        return await open_chat(self._ahead, self._model, chat, caller, self._request_timeout, shorten=True)

    async def prefix_tokens(self, prefix: WarmPrefix, tenant_name: str) -> list[int]:
        """The tokens of a prefix of a tenant.

        Raises:
            ApiError: the prefix has not exactly one of prompt and messages, cannot be rendered, or is too long.
        """
        if (prefix.prompt is None) == (prefix.messages is None):
            raise invalid("a prefix needs either a prompt or messages")
        if prefix.prompt is not None:
            tokens = await self._model.encode(prefix.prompt, add_special_tokens=True)
        else:
            opening = Conversation.model_construct(messages=prefix.messages, add_generation_prompt=False)
            tokens = await conversation_tokens(self._model, opening, tenant_name)
        self._model.check_text(tokens, None)
        if len(tokens) >= self._model.max_model_len:
            raise invalid(
                f"a prefix of {len(tokens)} tokens leaves no room within --max-model-len {self._model.max_model_len}"
            )
        return tokens

    async def _prefill(self, prefix: WarmPrefix, caller: Caller, begun: Begun) -> Outcome:
        tenant_name = tenant(caller.key_id, caller.tenant_header, prefix.user)
        tokens = await self.prefix_tokens(prefix, tenant_name)
        self._prefixes += 1
        request = Request(
            id=f"{ID_PREFIX}prefix-{self._prefixes}",
            tokens=tuple(tokens),
            params=SamplingParams(temperature=0.0, max_tokens=1),
            arrived=self._service.now(),
            tenant=tenant_name,
            service_class=BACKGROUND.name,
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


class Warm:
    """The endpoint. ``max_body_bytes`` limits request bodies."""

    def __init__(
        self, warmer: Warmer, computing: Computing, model: ServedModel, *, max_body_bytes: int
    ) -> None:
        self._warmer = warmer
        self._computing = computing
        self._model = model
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [Route(PATH, self.warm, methods=["POST"]), Route(PATH, self.state)]

    async def warm(self, request: HttpRequest) -> Response:
        """``POST /v1/cache/warm``: compute responses and prompt prefixes in idle time.

        Responses are computed for the request's own tenant and served to no other.
        """
        body = await parse_beside(await read_body(request, self._max_body_bytes), WarmBody, NOT_YET)
        caller: Caller = request.scope[CALLER]
        if body.from_history and caller.key_id is not None:
            message = "from_history computes recorded requests of every tenant and needs an admin key"
            raise permission_denied(message, "from_history")
        questions = []
        for number, each in enumerate(body.requests):
            raw = json_text(each.body, "the body").encode("utf-8", "surrogatepass")
            self._check(each.url, raw, f"requests[{number}].body")
            questions.append(Recorded(each.url, caller.key_id, caller.tenant_header, raw))
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
        taken = self._warmer.add(questions)
        found = await self._warmer.refill() if body.from_history else 0
        return JSONResponse(
            {"requests": taken, "prefixes": len(body.prefixes), "from_history": found}, status_code=202
        )

    async def state(self, request: HttpRequest) -> Response:
        """``GET /v1/cache/warm``: the progress of cache warming."""
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
