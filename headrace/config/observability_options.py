"""Options of logs, traces, usage, cost and resources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """What the server logs and stores, and where it sends traces and events of the prefix cache."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="Lowest level that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Field(description="Format of log lines: text is aligned for reading, json is one object per line."),
    ] = "text"
    log_name: Annotated[
        str,
        Field(
            description="Name that every log line shows, to tell servers apart that log to one place. With several "
            "models, the lines of each show its name by default."
        ),
    ] = ""
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
    usage_file: Annotated[
        str | None,
        Field(
            description="SQLite file to which usage and cost of each tenant, class, model and day are added. "
            "/v1/usage then covers the last 400 days, over restarts (default: none, since the server started)."
        ),
    ] = None
    kv_events_config: Annotated[
        str | None,
        Field(
            description="Publish over ZeroMQ which blocks the prefix cache gains and loses, in vLLM's format. A JSON "
            "object with endpoint, replay_endpoint, topic and more; see the guide. Needs the extra kv-events "
            "(default: none)."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Prices of device time and tokens. Without a price, responses have no cost; device time is always measured."""

    device_price: Annotated[
        str | None,
        Field(
            description="Price of the device per hour or second, for example 2.5/h. The cost of a request is then that "
            "of its device time (default: none).",
        ),
    ] = None
    price_per_million_prompt_tokens: Annotated[
        float,
        Field(
            ge=0,
            description="Price of a million computed prompt tokens. With a price of tokens, the cost of a request is "
            "that of its tokens instead of its device time.",
        ),
    ] = 0.0
    price_per_million_cached_tokens: Annotated[
        float, Field(ge=0, description="Price of a million prompt tokens found in the prefix cache.")
    ] = 0.0
    price_per_million_output_tokens: Annotated[
        float, Field(ge=0, description="Price of a million generated tokens.")
    ] = 0.0
    currency: Annotated[
        str,
        Field(
            pattern=r"^[A-Z]{3}$", description="Currency code of all prices, a label that is not converted."
        ),
    ] = "USD"


@dataclass(frozen=True, slots=True)
class ResourceOptions:
    """The peak rates of the device; `headrace bench roofline` measures them."""

    peak_flops: Annotated[
        float,
        Field(
            ge=0,
            description="Peak operations per second of one device, for example 989e12. With it, /metrics has model "
            "FLOPs utilization (MFU). 0: the data sheet's if the GPU is known, else no MFU.",
        ),
    ] = 0.0
    peak_bandwidth: Annotated[
        float,
        Field(
            ge=0,
            description="Peak memory bandwidth of one device in bytes per second, for example 3.35e12. With it, "
            "/metrics has memory bandwidth utilization (MBU). 0: the data sheet's if the GPU is known, else no MBU.",
        ),
    ] = 0.0
