"""Compiles a logged request as the server would, up to the caches, for an estimate of what they would save.

The stages are those of every request. Instead of the caches and the engine, `_Compiled` ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from headrace.api.batch.line_runner import OPENED
from headrace.api.batch.request_log import LoggedRequest
from headrace.api.body import parse
from headrace.api.caller import Caller
from headrace.api.compile.model import ServedModel
from headrace.api.errors import ApiError
from headrace.core.constraint import UnusableConstraint, json_text
from headrace.core.prediction.output_lengths import prior_tokens
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.response_cache.estimate import LoggedCall, Sent
from headrace.response_cache.lookup import keyed
from headrace.response_cache.query import LookupRequest
from headrace.response_cache.rules.key import digest
from headrace.service.answer import Answer


class NotEstimated(ValueError):
    """A request that the server would refuse, or that the caches do not answer."""


class _Lookups(Exception):
    """The sequences of a call, which has been compiled."""

    def __init__(self, lookups: Sequence[LookupRequest]) -> None:
        super().__init__()
        self.lookups = lookups


class _Compiled:
    """An `api.compile.call.Answers` that answers nothing: it raises `_Lookups`."""

    def now(self) -> float:
        return 0.0

    async def open(
        self, lookups: Sequence[LookupRequest], /, interval: int = 1, paced: bool = False
    ) -> NoReturn:
        raise _Lookups(lookups)

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        raise AssertionError("no call was opened")

    def stop_sequence(self, answer: Answer, index: int) -> None:
        raise AssertionError("no call was opened")


async def compile_call(
    model: ServedModel,
    logged: LoggedRequest,
    *,
    tenant: str | None,
    output_len: int | None,
    similar: bool,
    request_timeout: float,
) -> LoggedCall:
    """The call of a logged request.

    Args:
        model: the served model, whose name the request need not have: models never share a response.
        logged: the request.
        tenant: of all requests (None: each one's own, as on a server without API keys).
        output_len: tokens of an output whose length is not logged (None: the mean that the scheduler expects).
        similar: make the keys of the semantic cache too.
        request_timeout: the server's.

    Raises:
        NotEstimated: the server would refuse it, or it is of another endpoint.
    """
    endpoint = OPENED.get(logged.url)
    if endpoint is None:
        raise NotEstimated(f"{logged.url} is not estimated; {' and '.join(OPENED)} are")
    caller = Caller(tenant or logged.key_id, logged.tenant)
    try:
        raw = json_text(logged.body, "the body").encode("utf-8", "surrogatepass")
        body = parse(raw, endpoint.form, endpoint.not_yet)
        await endpoint.open(_Compiled(), model, body, caller, request_timeout)
    except _Lookups as compiled:
        lookups = compiled.lookups
    except ApiError as error:
        raise NotEstimated(f"the server would answer {error.status}: {error}") from None
    except (InvalidParameter, UnusableConstraint) as error:
        raise NotEstimated(f"the server would answer 400: {error}") from None
    else:
        raise AssertionError("a call ends in _Compiled.open")
    name = model.name if body.model in (None, *model.names) else body.model
    fingerprint = digest("estimate", name)
    known = None if logged.output_tokens is None else logged.output_tokens / len(lookups)
    sequences = [
        Sent(
            keyed(each, fingerprint, similar=similar),
            _expected(each.request, output_len) if known is None else known,
        )
        for each in lookups
    ]
    return LoggedCall(sequences, fingerprint, logged.timestamp, logged.seconds, logged.times)


def _expected(request: Request, output_len: int | None) -> float:
    """The length of an output that is not logged, within the limit of its request."""
    limit = float("inf") if request.params.max_tokens is None else float(request.params.max_tokens)
    return prior_tokens(limit) if output_len is None else min(output_len, limit)
