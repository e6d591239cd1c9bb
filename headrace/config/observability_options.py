"""Options of logs and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """What the server logs, and where it sends traces."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="Lowest level that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Field(description="Format of log lines: text is aligned for reading, json is one object per line."),
    ] = "text"
    access_log: Annotated[
        bool,
        Field(
            description="Log a line for every HTTP request (probes of /health and /metrics at level debug)."
        ),
    ] = True
    otlp_traces_endpoint: Annotated[
        str | None,
        Field(
            description="URL of an OpenTelemetry collector (OTLP over HTTP, for example "
            "http://localhost:4318/v1/traces) that receives a trace of each request; needs the extra otel "
            "(default: none)."
        ),
    ] = None
