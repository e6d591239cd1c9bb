"""HTTP errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``.

The constructors below are the complete list of errors that a client can receive. The text of an internal error is
logged and never sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from typing import Any

from starlette.responses import Response

from headrace.api.auth.access import Access
from headrace.config.errors import shortened
from headrace.core.adapters import ADAPTER_PREFIX
from headrace.core.constraint import FAILED_PREFIX
from headrace.core.events import Finished
from headrace.core.ports import LOST_PREFIX
from headrace.core.request import FinishReason, InvalidParameter, RejectReason
from headrace.core.tenancy.gate import Reject
from headrace.service.thread import ENGINE_FAILED

ERROR_FORMAT = "headrace.error_format"
"""The key in an ASGI scope of a function that turns an `ApiError` into a response, for APIs other than OpenAI's."""

INVALID = "invalid_request_error"
DEADLINE = "deadline_ms"
FAILED_MESSAGE = "The server had an error while processing your request."

NOT_YET_ROUTES: Mapping[str, str] = {
    "/v1/assistants": "The Assistants API",
    "/v1/audio": "Audio",
    "/v1/containers": "Containers",
    "/v1/conversations": "A stored conversation (use previous_response_id of /v1/responses)",
    "/v1/evals": "Evaluation",
    "/v1/fine_tuning": "Fine-tuning",
    "/v1/images": "Image generation",
    "/v1/messages/batches": "A batch of messages (use /v1/batches)",
    "/v1/moderations": "Moderation",
    "/v1/realtime": "The Realtime API",
    "/v1/threads": "The Assistants API",
    "/v1/uploads": "An upload in parts (use /v1/files)",
    "/v1/vector_stores": "A vector store",
    "/v1/videos": "Video",
}
"""Routes that clients know from other servers and that this server does not have, and what each would do; with all
paths below them."""

MAX_PARAM = 500
"""Characters of the field that an error names; the name of an unknown field may have megabytes."""

MOST_SHOWN = 100
"""Characters of a header that an error shows."""

OPTIONAL_ROUTES = {
    "/v1/files": "--batch-path",
    "/v1/batches": "--batch-path",
    "/v1/load_lora_adapter": "--enable-lora",
    "/v1/unload_lora_adapter": "--enable-lora",
}
"""Routes that an option of the server adds, and the option."""


class ApiError(Exception):
    """An error that is sent to the client with the HTTP status `status`."""

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
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(shortened(message))
        self.status = status
        self.type = type
        self.param = None if param is None else param[:MAX_PARAM]
        self.code = code
        self.headers = dict(headers or {})
        self.details = details  # only Anthropic's format has them
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    def body(self) -> bytes:
        """The error as JSON, for a response or for an event of a stream that has started."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def response(self) -> Response:
        """The error as an HTTP response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def respond(error: ApiError, scope: MutableMapping[str, Any]) -> Response:
    """The error as an HTTP response, in the format of the API that the request belongs to."""
    convert: Callable[[ApiError], Response] = scope.get(ERROR_FORMAT, ApiError.response)
    return convert(error)


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: a field has an invalid value; ``param`` names the field."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, what: str | None = None) -> ApiError:
    """400: a field or value that is known but not supported yet."""
    return invalid(f"{what or param} is not supported yet", param, "unsupported_parameter")


def context_length_exceeded(prompt: int, asked: int, limit: int, param: str | None) -> ApiError:
    """400: prompt and completion do not fit into the model's context."""
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + asked} tokens "
        f"({prompt} in the prompt, {asked} for the completion). Please shorten the prompt or the completion.",
        param,
        "context_length_exceeded",
    )


def text_too_long(fewest: int, limit: int) -> ApiError:
    """400: the prompt does not fit into the model's context, whatever its exact number of tokens is."""
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, your prompt has at least {fewest} tokens. "
        "Please shorten the prompt.",
        code="context_length_exceeded",
    )


def prompt_too_long(prompt: int, limit: int) -> ApiError:
    """400: the prompt fills the model's context; in the words that Anthropic's clients look for."""
    return invalid(
        f"prompt is too long: {prompt} tokens > {limit - 1} maximum", "messages", "context_length_exceeded"
    )


def invalid_api_key() -> ApiError:
    """401: the request has no API key, or one that the server does not know."""
    return ApiError(
        401,
        "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


_REMEDIES = {
    Access.ADMIN: "an admin key: set --admin-key, or give the key the role 'admin' in the file of --api-key-file",
    Access.METRICS: "a metrics key or an admin key: set --metrics-key, give the key the role 'metrics' in the file of "
    "--api-key-file, or read the metrics from the port of --metrics-port",
}


def role_required(access: Access) -> ApiError:
    """403: the key is valid, but its role does not admit it to this route."""
    needed = _REMEDIES.get(access, "an inference key or an admin key; this key may only read metrics")
    return permission_denied(f"This route needs {needed}.")


def permission_denied(message: str, param: str | None = None) -> ApiError:
    """403: the key may not do this."""
    return ApiError(403, message, type="permission_error", param=param, code="not_allowed")


def host_not_allowed(host: str) -> ApiError:
    """403: the request names a host that is not this server's, as a page does that rebinds its name."""
    return ApiError(
        403,
        f"The host {host[:MOST_SHOWN]!r} is not allowed. If it is a name of this server, add it to --allowed-hosts.",
        type="permission_error",
        param="Host",
        code="host_not_allowed",
    )


def origin_not_allowed(origin: str) -> ApiError:
    """403: a page of another origin sent the request."""
    return ApiError(
        403,
        f"Requests from {origin[:MOST_SHOWN]} are not allowed. If you trust the page, the browser extension or the "
        "application (null: a file or a desktop application), add its origin to --allowed-origins. Behind a reverse "
        "proxy, let the proxy pass the Host header or X-Forwarded-Host.",
        type="permission_error",
        param="Origin",
        code="origin_not_allowed",
    )


def unsupported_media_type(given: str) -> ApiError:
    """415: the body is not declared as JSON."""
    return ApiError(
        415,
        f"The Content-Type must be application/json, not {given[:MOST_SHOWN]!r}.",
        param="Content-Type",
        code="unsupported_media_type",
    )


def model_not_found(model: str, param: str = "model") -> ApiError:
    """404: the request names a model that is not served."""
    return ApiError(404, f"The model {model!r:.200} does not exist.", param=param, code="model_not_found")


def model_required(names: Iterable[str]) -> ApiError:
    """400: the server has several models, and the request names none."""
    listed = ", ".join(names)
    return invalid(
        f"This server has several models ({listed}): name one in the field model, in ?model=, or call"
        " /models/NAME before the path.",
        "model",
        "model_required",
    )


def model_unavailable(model: str, *, failed: bool) -> ApiError:
    """503: the process of a model has ended; it is being started again, unless that has ``failed``."""
    if failed:
        message = f"The engine of the model {model!r} has failed. The server must be started again."
        return ApiError(503, message, type="server_error", code="engine_failed")
    message = f"The process of the model {model!r} has ended, and is being started again."
    return ApiError(503, message, type="overloaded", code="model_restarting", retry_after=10)


def too_large(limit: int) -> ApiError:
    """413: the request body is larger than ``--max-body-bytes``."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def unsupported_encoding(why: str, encodings: Iterable[str]) -> ApiError:
    """415: the body has a ``Content-Encoding`` that the server cannot decode; it decodes ``encodings``."""
    accepted = ", ".join(encodings)
    return ApiError(
        415,
        f"{why}. Send the body as {accepted}, or without an encoding.",
        param="Content-Encoding",
        code="unsupported_encoding",
        headers={"Accept-Encoding": accepted},
    )


def request_line_too_long(limit: int) -> ApiError:
    """414: path and query are too long."""
    return ApiError(414, f"The request's path and query are longer than {limit} bytes.", code="uri_too_long")


def headers_too_large(count: int, limit: int) -> ApiError:
    """431: too many headers, or too many bytes of headers."""
    return ApiError(
        431,
        f"The request has more than {count} headers, or more than {limit} bytes of headers.",
        code="headers_too_large",
    )


def deadline_unreachable(why: str) -> ApiError:
    """408: rejected without computing, because the request cannot finish before its deadline."""
    return ApiError(
        408,
        f"The request's deadline cannot be met: {why}.",
        type="timeout",
        param=DEADLINE,
        code="deadline_unreachable",
    )


def timed_out(seconds: float, param: str | None = None) -> ApiError:
    """408: the deadline passed before the response was complete; ``param`` is the field that set it, if one did."""
    return ApiError(
        408,
        f"The request did not finish within {seconds:g} seconds.",
        type="timeout",
        param=param,
        code="deadline_exceeded",
    )


def turned_away(verdict: Reject, headers: Mapping[str, str], param: str | None = None) -> ApiError:
    """503: the server accepts no request now; 429: the tenant's limit is reached; 400: the request is too large.

    ``param`` is the field that makes it large.
    """
    if verdict.reason is RejectReason.TOO_LARGE:
        return invalid(f"{verdict.message}.", param)
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
        f"The server accepts no further request now: {verdict.message}.",
        type="overloaded",
        code=str(verdict.reason),
        retry_after=verdict.retry_after,
    )


def not_cached() -> ApiError:
    """504, as RFC 9111 defines for ``only-if-cached``: there is no cached response, and none may be computed."""
    return ApiError(
        504,
        "There is no cached response to this request, and only_if_cached forbids computing one.",
        type="not_cached",
        param="response_cache",
        code="not_cached",
    )


def not_stored() -> ApiError:
    """507: a background response cannot be fetched later, since it could not be stored."""
    return ApiError(
        507,
        "The response could not be stored, which background needs: the disk may be full.",
        type="server_error",
        param="background",
        code="insufficient_storage",
    )


def shutting_down() -> ApiError:
    """503: the server stopped before the request had finished."""
    return ApiError(
        503,
        "The server is shutting down and could not finish this request.",
        type="overloaded",
        code="draining",
        retry_after=5,
    )


def too_many_connections() -> ApiError:
    """503: the server has no room for another connection."""
    return ApiError(
        503,
        "The server has too many open connections. Close idle ones, or try again.",
        type="overloaded",
        code="too_many_connections",
        retry_after=5,
    )


def too_slow(what: str, limit: str) -> ApiError:
    """408: a part of the request did not arrive in time."""
    return ApiError(408, f"The {what} of the request did not arrive within {limit}.", code="request_too_slow")


def restarting() -> ApiError:
    """503: a process with a part of the model was lost, and is being started again."""
    return ApiError(
        503,
        "A part of the model was lost while it computed this request, and is being started again.",
        type="overloaded",
        code="model_restarting",
        retry_after=10,
    )


def engine_failed() -> ApiError:
    """503: the engine has failed, so this server computes nothing until it is started again."""
    return ApiError(
        503,
        "The engine of this server has failed. The server must be started again.",
        type="server_error",
        code="engine_failed",
    )


def request_not_found(call_id: str) -> ApiError:
    """404: the request is not known, or belongs to another tenant."""
    return ApiError(404, f"There is no request {call_id!r:.200}.", param="id", code="request_not_found")


def aborted() -> ApiError:
    """409: the request was ended through ``/abort_request``."""
    return ApiError(409, "The request was aborted.", type="aborted", code="request_aborted")


def route_not_found(path: str, routes: Container[str] = ()) -> ApiError:
    """404; routes that other servers have are named, so that the client's author does not look for a typing error.

    ``routes`` are the paths that the application has. Clients would retry a status of 500 or more.
    """
    for route, what in NOT_YET_ROUTES.items():
        if path == route or path.startswith(f"{route}/"):
            message = f"{what} is not supported: this server has no route {path!r:.200}."
            return ApiError(404, message, code="unsupported_route")
    for route, option in OPTIONAL_ROUTES.items():
        if route not in routes and (path == route or path.startswith(f"{route}/")):
            message = f"{route} is switched off: start the server with {option}."
            return ApiError(404, message, code="unsupported_route")
    return ApiError(404, f"There is no route {path!r:.200}.", code="route_not_found")


def failed() -> ApiError:
    """500: a bug or a fault of the server; the log has the details."""
    return ApiError(500, FAILED_MESSAGE, type="server_error", code="server_error")


def of_finish(finished: Finished, timeout: float, *, own_deadline: bool = False) -> ApiError | None:
    """The error that a `Finished` event means for the client; None for a normal end.

    ``own_deadline`` says that the request set its ``timeout`` itself.
    """
    match finished.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return timed_out(timeout, DEADLINE if own_deadline else None)
        case FinishReason.UNREACHABLE:
            return deadline_unreachable(finished.message)
        case FinishReason.REJECTED:
            return invalid(f"The request cannot be served: {finished.message}.", code="request_rejected")
        case FinishReason.CANCELLED:
            return shutting_down()
        case FinishReason.FAILED if finished.message.startswith(FAILED_PREFIX):
            return invalid(finished.message, code="structured_output_failed")
        case FinishReason.FAILED if finished.message.startswith(ADAPTER_PREFIX):
            return invalid(finished.message, "model", code="adapter_failed")
        case FinishReason.FAILED:
            return lost(finished.message)


def lost(message: str) -> ApiError:
    """What the ``message`` of a `Finished` means for the client of a request that no engine computes."""
    if message.startswith(LOST_PREFIX):
        return restarting()
    return engine_failed() if message == ENGINE_FAILED else failed()


def wrong_method(method: str, path: str, allowed: Iterable[str]) -> ApiError:
    """405: the route has other methods."""
    return ApiError(
        405,
        f"{method} is not allowed on {path!r:.200}.",
        code="method_not_allowed",
        headers={"Allow": ", ".join(allowed)},
    )


def as_api_error(error: Exception) -> ApiError | None:
    """What a client gets for an exception that a route raised; None if it was not expected."""
    if isinstance(error, InvalidParameter):  # it names the field as the client spelled it
        return invalid(str(error), error.param)
    return error if isinstance(error, ApiError) else None
