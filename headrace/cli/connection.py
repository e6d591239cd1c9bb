"""Requests of commands to a running server: connect, call, stream, and plain errors.

httpx is imported on first use, so that ``--help`` does not wait for it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    import httpx

ResultT = TypeVar("ResultT")

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_SECONDS = 5.0


class ServerError(Exception):
    """The server cannot be reached, or rejected a request; the message is for the user."""


def open_client(url: str, api_key: str | None = None) -> httpx.Client:
    """A client for the server at ``url``, without a time limit for responses.

    Raises:
        ServerError: the URL is not valid, or the key cannot be sent in a header.
    """
    import httpx

    if not url.startswith(("http://", "https://")):
        raise ServerError(f"--url {url}: expected an address that begins with http:// or https://")
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ServerError("--api-key: expected printable ASCII characters")
    try:
        return httpx.Client(
            base_url=server_root(url),
            headers=authorization(api_key),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=uses_proxies(url),
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise ServerError(
            f"--url {url}: expected an address such as http://127.0.0.1:8000 ({error})"
        ) from error


def asked(url: str, api_key: str | None, ask: Callable[[httpx.Client], ResultT]) -> ResultT:
    """What ``ask`` gets from the server at ``url``; its error is printed and ends the command."""
    try:
        with open_client(url, api_key) as client:
            return ask(client)
    except ServerError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def server_root(url: str) -> str:
    """The address without the ``/v1`` that OpenAI clients append."""
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers that carry an API key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def uses_proxies(url: str) -> bool:
    """Whether the environment's proxies apply: not for addresses of this machine."""
    return urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")


def served_model(client: httpx.Client) -> str:
    """The first model that the server offers.

    Raises:
        ServerError: there is no server, or it rejects the request.
    """
    import httpx

    try:
        response = client.get("/v1/models")
    except httpx.TransportError as error:
        raise ServerError(no_server(client.base_url, error)) from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(_message(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"the server at {client.base_url} is not compatible with OpenAI's API") from error


def call_raw(
    client: httpx.Client,
    method: str,
    path: str,
    *,
    body: dict[str, Any] | None = None,
    content: bytes | None = None,
    query: dict[str, str] | None = None,
) -> httpx.Response:
    """The server's response to one request.

    Raises:
        ServerError: it rejects the request, or cannot be reached.
    """
    import httpx

    try:
        response = client.request(method, path, json=body, content=content, params=query)
    except httpx.TransportError as error:
        raise ServerError(no_server(client.base_url, error)) from error
    if not response.is_success:
        raise ServerError(_message(response))
    return response


def call(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """As `call_raw`, as an object."""
    response = call_raw(client, method, path, body=body)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"the server at {client.base_url} is not a Headrace server")
    return answer


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed response, as they arrive.

    Raises:
        ServerError: the server rejects the request, ends the stream early, or cannot be reached.
    """
    import httpx

    try:
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise ServerError(_message(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue  # a comment that keeps the connection awake, or the blank line between events
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                try:
                    chunk = json.loads(data)
                except ValueError as error:
                    raise ServerError(f"the server sent invalid JSON: {data[:100]}") from error
                if "error" in chunk:
                    raise ServerError(_error_text(chunk["error"]))
                yield chunk
    except UnicodeEncodeError as error:  # bytes of a terminal or a pipe that are not UTF-8
        raise ServerError(f"the input is not valid text: {error}") from error
    except httpx.ConnectError as error:
        raise ServerError(no_server(client.base_url, error)) from error
    except httpx.TransportError as error:
        raise ServerError(f"the connection to the server broke: {plain(error)}") from error


def no_server(url: httpx.URL | str, error: Exception) -> str:
    """The message for a server that does not respond: how to start one, or to name another."""
    return (
        f"no server answers at {url} ({plain(error)}).\n"
        "Start one in another terminal with:  headrace serve\n"
        "or name another with:  --url http://HOST:PORT"
    )


def plain(error: Exception) -> str:
    """The text of a network error without the errno."""
    text = re.sub(r"\[Errno -?\d+\] ?", "", str(error)) or type(error).__name__
    return text[0].lower() + text[1:]


def printable(text: str) -> str:
    """Text without control characters, which could change the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t" or ord(char) > 0x9F)


def _error_text(error: Any) -> str:
    """An error's message; some servers send an object, as OpenAI does, others only the text."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _message(response: httpx.Response) -> str:
    try:
        return _error_text(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}: {response.text[:200]}"
