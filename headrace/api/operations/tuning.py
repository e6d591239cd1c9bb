"""``/v1/experiments`` and ``/v1/tuner``: experiments that change one setting of the running server, and the tuner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import typed_body
from headrace.api.errors import ApiError
from headrace.api.routing import Endpoints, route
from headrace.api.wire import Wire
from headrace.tuning.live import LiveTuning

EXAMPLE = {"setting": "mixed_prefill_ratio", "treatment": 0.4, "metric": "itl_p99_seconds"}
"""The body of an experiment in the description of the API."""


class ExperimentBody(Wire):
    """An experiment: one setting, the other value, and the metric that decides."""

    setting: str = Field(
        description="Setting to change: one of the settings that `GET /v1/experiments` lists."
    )
    treatment: float | int | str = Field(description="Value to compare with the current one.")
    metric: str = Field(description="Metric that decides, such as `itl_p99_seconds`.")
    guards: dict[str, float] = Field(
        {},
        description="Metrics and the share by which each may become worse; beyond it the change is rolled back.",
    )
    unit: str = Field(
        "",
        description="Unit of assignment to the two values: `time` (the whole engine), `request` or `tenant`. "
        "Each setting lists its units.",
    )
    share: float = Field(
        0.5, description="Share of the requests or tenants that have the treatment; 0.5 by `time`."
    )
    window_seconds: float = Field(
        30.0, description="Length of one measured window; a tenant keeps its arm for that time."
    )
    burn_in_seconds: float = Field(5.0, description="Time after each change that is not measured.")
    max_seconds: float = Field(7200.0, description="Time after which an undecided experiment ends.")
    alpha: float = Field(
        0.05, description="Maximum probability of reporting a difference that does not exist."
    )
    seed: int = Field(0, description="Seed of the order of the windows.")
    adopt: bool = Field(False, description="Keep the treatment at the end if it was better.")
    name: str = Field("", description="Text that is shown with the experiment.")


class ExperimentRoutes(Endpoints):
    """The endpoints. ``known`` describes the settings that may change and the metrics.

    ``dry_run`` runs an experiment in virtual time; it raises RuntimeError if that is not possible now.
    """

    def __init__(
        self,
        experiments: LiveTuning,
        known: Callable[[], dict[str, Any]],
        dry_run: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        *,
        max_body_bytes: int,
    ) -> None:
        self._experiments = experiments
        self._known = known
        self._dry_run = dry_run
        self._max_body_bytes = max_body_bytes

    @route(
        "POST /v1/experiments",
        Access.ADMIN,
        "Start an experiment: compare a setting's current value with another one on live traffic.",
        body=ExperimentBody,
        example=EXAMPLE,
    )
    async def create(self, request: Request) -> Response:
        """Start one; 409 while another runs."""
        body = await typed_body(request, self._max_body_bytes, ExperimentBody, {})
        try:
            experiment = self._experiments.begin(body.model_dump(exclude_unset=True))
        except RuntimeError as error:
            raise ApiError(409, str(error), code="experiment_running") from None
        return JSONResponse(experiment.report(), status_code=201)

    @route(
        "POST /v1/experiments/dry-run",
        Access.ADMIN,
        "Simulate an experiment with the server's own load and step times, and report it.",
        body=ExperimentBody,
        example=EXAMPLE,
    )
    async def dry_run(self, request: Request) -> Response:
        """Simulate one with the server's own load; 409 if that is not possible."""
        body = await typed_body(request, self._max_body_bytes, ExperimentBody, {})
        try:
            return JSONResponse(await self._dry_run(body.model_dump(exclude_unset=True)))
        except RuntimeError as error:
            raise ApiError(409, str(error), code="no_dry_run") from None

    @route(
        "GET /v1/experiments",
        Access.ADMIN,
        "List the experiments, the settings that may change, and the metrics.",
    )
    async def list(self, request: Request) -> Response:
        """All experiments, newest first, the settings that may change, and the metrics."""
        shown = [each.report() for each in self._experiments.experiments.all()]
        return JSONResponse({"object": "list", "data": shown, **self._known()})

    @route(
        "GET /v1/experiments/{id}",
        Access.ADMIN,
        "Report one experiment: effect, interval, guards, windows, curve.",
    )
    async def get(self, request: Request) -> Response:
        """Effect, interval, guards, decision, log, and the measurements over time."""
        experiment = self._find(request)
        measured = {"windows": experiment.windows(), "curve": experiment.curve()}
        return JSONResponse(experiment.report() | measured)

    @route(
        "DELETE /v1/experiments/{id}",
        Access.ADMIN,
        "Stop an experiment, or roll back the treatment that it adopted.",
    )
    async def stop(self, request: Request) -> Response:
        """Stop it, or undo a treatment that it has adopted.

        The setting returns to the control value. 409 if a later experiment changed it, or runs.
        """
        self._find(request)
        try:
            return JSONResponse(self._experiments.end(request.path_params["id"]).report())
        except RuntimeError as error:
            raise ApiError(409, str(error), code="experiment_superseded") from None

    def _find(self, request: Request) -> Any:
        experiment_id = request.path_params["id"]
        try:
            return self._experiments.experiments.get(experiment_id)
        except KeyError:
            raise ApiError(
                404, f"There is no experiment {experiment_id!r:.200}.", code="experiment_not_found"
            ) from None


class TunerBody(Wire):
    """The tuner's new mode."""

    mode: Literal["off", "advise", "on"] = Field(
        description="off: undo the change that is not confirmed; advise: rehearse changes and report the better ones; "
        "on: make them."
    )


class TunerRoutes(Endpoints):
    """The endpoints; ``report`` and ``set_mode`` are the tuner's."""

    def __init__(
        self, report: Callable[[], dict[str, Any]], set_mode: Callable[[str], None], *, max_body_bytes: int
    ) -> None:
        self._report = report
        self._set_mode = set_mode
        self._max_body_bytes = max_body_bytes

    @route("GET /v1/tuner", Access.ADMIN, "Report the tuner: mode, settings with their bounds, changes.")
    async def get(self, request: Request) -> Response:
        """Mode, settings with their bounds, the change that is not confirmed, and the log."""
        return JSONResponse(self._report())

    @route(
        "POST /v1/tuner", Access.ADMIN, "Change the tuner's mode.", body=TunerBody, example={"mode": "advise"}
    )
    async def set(self, request: Request) -> Response:
        """Change the mode."""
        body = await typed_body(request, self._max_body_bytes, TunerBody, {})
        self._set_mode(body.mode)
        return JSONResponse(self._report())
