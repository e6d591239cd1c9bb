"""The engine's steps, row by row: of this server, of a small simulation, and of the guided tour."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import typed_body
from headrace.api.errors import ApiError, invalid
from headrace.api.operations.requests import download, read_format
from headrace.api.routing import Endpoints, route
from headrace.api.wire import Wire

MOST_STEPS = 1000
"""Maximum steps in one response."""

MAX_BODY_BYTES = 1 << 16

MOST_SIMULATIONS = 4
"""Maximum simulations that run (one) or wait at a time."""


class ScenarioRequest(Wire):
    """A request of a simulation. Its tokens are random."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    output_tokens: int = Field(description="Tokens of the output.")
    arrival: float | int = Field(0.0, description="Seconds after the begin.")
    shared_tokens: int = Field(0, description="First tokens of the prompt that are the same in all requests.")
    quotes: bool = Field(
        False, description="Whether the output repeats the prompt, so that drafts are accepted."
    )
    priority: int = Field(0, description="Lower runs sooner under the policy `priority`, -100 to 100.")


class SimulationBody(Wire):
    """A small workload, and settings with the names of the server's options."""

    requests: list[ScenarioRequest] = Field(description="Requests of the workload.")
    scheduling_policy: Literal["fair", "fcfs", "priority", "static"] = Field(
        "fair", description="Scheduling policy."
    )
    max_num_seqs: int = Field(4, description="Maximum number of sequences that run at once.")
    max_num_batched_tokens: int = Field(512, description="Maximum number of tokens in one step.")
    num_blocks: int = Field(256, description="Blocks of the KV cache, of 16 tokens each.")
    enable_chunked_prefill: bool = Field(True, description="Compute long prompts in several steps.")
    enable_prefix_caching: bool = Field(True, description="Share KV blocks of equal prefixes.")
    num_speculative_tokens: int = Field(0, description="Tokens drafted from the prompt in each step.")


Document = Mapping[str, Any]


class StepRoutes(Endpoints):
    """The endpoints.

    ``live(after, limit, format, request)`` returns at most ``limit`` steps of this server with numbers above ``after``,
    and the block table of a request (empty: none). ``simulate`` runs a simulation on another thread; if a field is out
    of bounds, it raises ValueError with the attribute ``field``. ``tour`` lists the stops.
    """

    def __init__(
        self,
        live: Callable[[int, int, str, str], Awaitable[Document]],
        simulate: Callable[[Mapping[str, Any], str], Document],
        tour: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._live = live
        self._simulate = simulate
        self._tour = tour
        self._simulating = asyncio.Lock()
        self._asked = 0  # simulations that run or wait

    @route(
        "GET /v1/steps",
        Access.ADMIN,
        "Report the last steps: rows, queue with reasons, blocks. Query: after, limit, request, format=perfetto.",
    )
    async def steps(self, request: Request) -> Response:
        """The last steps. ``?after=`` selects those with a higher number.

        ``?request=`` adds the block table of a running request to the state of the blocks.
        Steps are recorded from the first read on, until 15 seconds after the last one.
        """
        form = read_format(request)
        after = _number(request, "after", -1, -1, 1 << 62)
        limit = _number(request, "limit", 200, 1, MOST_STEPS)
        document = await self._live(after, limit, form, request.query_params.get("request", ""))
        return await asyncio.to_thread(_shown, document, form, "steps")

    @route(
        "POST /v1/simulations",
        Access.ANY_KEY,
        "Simulate a small workload and report each of its steps; ?format=perfetto for a trace.",
        body=SimulationBody,
        example={"requests": [{"prompt_tokens": 64, "output_tokens": 16}], "max_num_seqs": 2},
    )
    async def simulate(self, request: Request) -> Response:
        """Simulate a small workload, and return all of its steps. One runs at a time."""
        form = read_format(request)
        body = await typed_body(request, MAX_BODY_BYTES, SimulationBody, {})
        if self._asked >= MOST_SIMULATIONS:
            why = f"{MOST_SIMULATIONS} simulations run or wait already; try again."
            raise ApiError(429, why, code="too_many_simulations", retry_after=1)
        self._asked += 1
        try:
            async with self._simulating:
                return await asyncio.to_thread(self._simulated, body, form)
        except ValueError as error:
            raise invalid(str(error), getattr(error, "field", None)) from None
        finally:
            self._asked -= 1

    def _simulated(self, body: SimulationBody, form: str) -> Response:
        return _shown(self._simulate(body.model_dump(), form), form, "simulation")

    @route("GET /v1/tour", Access.ANY_KEY, "List the stops of the guided tour, with their simulations.")
    async def tour(self, request: Request) -> Response:
        """The stops of the guided tour, with the bodies of their simulations."""
        return JSONResponse({"object": "list", "data": list(self._tour())})


def _shown(document: Document, form: str, name: str) -> Response:
    """The response. Call it on a worker thread: it may have megabytes."""
    return download(document, name) if form == "perfetto" else JSONResponse(document)


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise invalid(f"{name} must be an integer from {least} to {most}, got {text[:40]!r}", name)
    return value
