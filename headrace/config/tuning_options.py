"""Options of experiments on settings, and of the tuner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from headrace.config.quantities import SECONDS


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """Experiments on settings, and the tuner."""

    tuner: Annotated[
        Literal["off", "advise", "on"],
        Field(
            description="Tune settings while serving, in small steps within bounds. advise: try changes and log the "
            "better ones; on: adopt them."
        ),
    ] = "off"
    tuner_window: Annotated[
        float,
        Field(
            ge=1.0,
            description="Length of one measured window of the tuner; it should hold at least some tens of requests.",
            json_schema_extra=SECONDS,
        ),
    ] = 30.0

    experiments_file: Annotated[
        str | None,
        Field(
            description="JSON file of the experiments of /v1/experiments, which then continue after a restart "
            "(default: none, they are lost)."
        ),
    ] = None
