"""Every refusal has one shape, OpenAI's: ``{"error": {"message", "type", "param", "code"}}``.

The constructors are the whole list of what a client can meet. An internal error's text is logged, never sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.events import Finished
from headrace.core.request import FinishReason, InvalidParameter, RejectReason
from headrace.core.tenancy.gate import Reject

INVALID = "invalid_request_error"
FAILED_MESSAGE = "The server had an error while processing your request."

NOT_YET_ROUTES = (
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/experiments",
    "/v1/tuner",
    "/dashboard",
    "/pause",
    "/resume",
)
"""Routes that clients know and this server does not have yet; what lies below them neither."""

OPTIONAL_ROUTES = {"/v1/files": "--batch-path", "/v1/batches": "--batch-path"}
"""Routes that an option of the server adds, and the option."""


class ApiError(Exception):
    """What a client did wrong, or what the server cannot do for it now; ends in an answer of `status`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    def body(self) -> bytes:
        """The error as JSON, for a response or for an event of a stream that has begun."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def response(self) -> Response:
        """The error as an HTTP response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: a field that cannot be; ``param`` names it."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, what: str | None = None) -> ApiError:
    """400: a field or value that is known but belongs to a capability that does not exist yet."""
    return invalid(f"{what or param} is not supported yet", param, "unsupported_parameter")


def context_length_exceeded(prompt: int, asked: int, limit: int, param: str | None) -> ApiError:
    """400: prompt and answer do not fit into the model's context."""
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + asked} tokens "
        f"({prompt} in the prompt, {asked} for the completion). Please shorten the prompt or the completion.",
        param,
        "context_length_exceeded",
    )


def invalid_api_key() -> ApiError:
    """401."""
    return ApiError(
        401,
        "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY'.",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(model: str) -> ApiError:
    """404: another model than the one served."""
    return ApiError(404, f"The model {model!r} does not exist.", param="model", code="model_not_found")


def too_large(limit: int) -> ApiError:
    """413: the body is longer than the server reads."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def deadline_unreachable(why: str) -> ApiError:
    """408: nothing was computed, for the answer could not have come before its deadline."""
    return ApiError(
        408, f"The request's deadline cannot be met: {why}.", type="timeout", code="deadline_unreachable"
    )


def timed_out(seconds: float) -> ApiError:
    """408: the deadline passed before the answer was whole."""
    return ApiError(
        408,
        f"The request did not finish within {seconds:g} seconds.",
        type="timeout",
        code="deadline_exceeded",
    )


def turned_away(verdict: Reject, headers: Mapping[str, str]) -> ApiError:
    """503: the gate is shut to all calls; 429: to this tenant's; 400: it will never be open to this one."""
    if verdict.reason is RejectReason.TOO_LARGE:
        return invalid(f"{verdict.message}.")
    if verdict.reason is RejectReason.TENANT_LIMIT:
        return ApiError(
            429,
            f"Rate limit reached: {verdict.message}. Try again in {verdict.retry_after} s.",
            type="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=verdict.retry_after,
            headers=dict(headers),
        )
    return ApiError(
        503,
        f"The server takes no further request now: {verdict.message}.",
        type="overloaded",
        code=str(verdict.reason),
        retry_after=verdict.retry_after,
    )


def not_cached() -> ApiError:
    """504, as RFC 9111 has it for ``only-if-cached``: there is no kept answer, and the caller wants none computed."""
    return ApiError(
        504,
        "There is no cached answer to this request, and it asked for none to be computed.",
        type="not_cached",
        param="response_cache",
        code="not_cached",
    )


def shutting_down() -> ApiError:
    """503: the drain ended before the answer did."""
    return ApiError(
        503,
        "The server is shutting down and could not finish this request.",
        type="overloaded",
        code="draining",
        retry_after=5,
    )


def request_not_found(call_id: str) -> ApiError:
    """404: a request that is not known, or another's."""
    return ApiError(404, f"There is no request {call_id!r}.", param="id", code="request_not_found")


def aborted() -> ApiError:
    """409: somebody ended the request by its id."""
    return ApiError(409, "The request was aborted.", type="aborted", code="request_aborted")


def route_not_found(path: str) -> ApiError:
    """404; 501 where clients know the route from elsewhere, so that nobody looks for a mistake of his own."""
    if any(path == route or path.startswith(f"{route}/") for route in NOT_YET_ROUTES):
        return ApiError(501, f"{path} is not supported yet.", type="not_supported", code="unsupported_route")
    for route, option in OPTIONAL_ROUTES.items():
        if path == route or path.startswith(f"{route}/"):
            message = f"{route} is switched off: start the server with {option}."
            return ApiError(501, message, type="not_supported", code="unsupported_route")
    return ApiError(404, f"There is no route {path!r}.", code="route_not_found")


def failed() -> ApiError:
    """500: our fault; what happened is in the log."""
    return ApiError(500, FAILED_MESSAGE, type="server_error", code="server_error")


def of_finish(finished: Finished, timeout: float) -> ApiError | None:
    """The error that a `Finished` means to its caller; None where the answer ended as it should."""
    match finished.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return timed_out(timeout)
        case FinishReason.UNREACHABLE:
            return deadline_unreachable(finished.message)
        case FinishReason.REJECTED:
            return invalid(f"The request cannot be served: {finished.message}.", code="request_rejected")
        case FinishReason.CANCELLED:
            return shutting_down()
        case FinishReason.FAILED:
            return failed()


async def http_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals (unknown route, wrong method) in our shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        shown = route_not_found(path)
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not allowed on {path!r}."
        shown = ApiError(405, message, code="method_not_allowed")
    else:
        shown = ApiError(error.status_code, error.detail)
    shown.headers.update(error.headers or {})
    return shown.response()


async def api_error(request: HttpRequest, error: Exception) -> Response:
    """What a route raised on purpose."""
    assert isinstance(error, ApiError)
    return error.response()


async def invalid_parameter(request: HttpRequest, error: Exception) -> Response:
    """What the core refused: it names the field as the caller spelt it."""
    assert isinstance(error, InvalidParameter)
    return invalid(str(error), error.param).response()


async def unexpected(request: HttpRequest, error: Exception) -> Response:
    """What nobody foresaw; the edge logs it."""
    return failed().response()
