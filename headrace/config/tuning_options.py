"""Options of experiments on settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """Where the experiments of `/v1/experiments` are stored."""

    experiments_file: Annotated[
        str | None,
        Field(
            description="JSON file of the experiments of /v1/experiments, which then continue after a restart "
            "(default: none, they are lost)."
        ),
    ] = None
