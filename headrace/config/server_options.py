"""Options of the HTTP server: its address, keys and limits; experiments and the tuner; logs, traces, usage and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from headrace.config.values import BYTES, SECONDS

# Options of files and batches on the server: their folder, and the limits of each tenant.


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The folder of `/v1/files` and `/v1/batches`, and the limits of each tenant."""

    batch_path: Annotated[
        str | None,
        Field(
            description="Folder for the files and batches of /v1/files and /v1/batches (default: none, both are off)."
        ),
    ] = None
    batch_file_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum size of an uploaded file; larger ones get status 413.",
            json_schema_extra=BYTES,
        ),
    ] = 200 << 20
    batch_tenant_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum total size of one tenant's files; further uploads get status 403.",
            json_schema_extra=BYTES,
        ),
    ] = 4 << 30
    batch_tenant_files: Annotated[
        int, Field(ge=1, description="Maximum number of one tenant's files; further uploads get status 403.")
    ] = 1000
    batch_max_lines: Annotated[int, Field(ge=1, description="Maximum number of requests in one batch.")] = (
        50_000
    )
    batch_tenant_batches: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum number of one tenant's unfinished batches; further ones get status 429.",
        ),
    ] = 16
    batch_concurrency: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="Maximum number of running requests of all batches together, in each service class.",
        ),
    ] = 16


METRIC_NAME = {"expected": "letters, digits and underscores that do not begin with a digit"}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address, API keys, TLS, limits of the queue, and metrics."""

    host: Annotated[
        str, Field(description="Address to listen on; 0.0.0.0 accepts connections from other machines.")
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0 takes any free port.")] = (
        8000
    )
    uds: Annotated[
        str | None,
        Field(
            description="Unix socket to listen on instead of --host and --port. Its file gets the permissions that the "
            "umask of the process leaves (default: none)."
        ),
    ] = None
    models: Annotated[
        str | None,
        Field(
            description="Several models in one server, instead of MODEL: a JSON list of objects with the options of "
            "each, or a list in the YAML file. Each model has its own process and memory; requests name it (default: "
            "none)."
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Field(
            description="Origin whose pages may call the API from a browser (CORS), null, or *. Requests of other "
            "pages get status 403. Repeatable (default: none)."
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Field(
            description="Host name under which clients call the server, *.DOMAIN, or *. Requests to other names get "
            "status 403; IP addresses and localhost are always allowed. Repeatable (default: any name; localhost "
            "only, on a loopback address without API keys)."
        ),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        Field(description="API key of the role inference. Repeatable (default: no key is required)."),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Field(
            description="File of API keys, one per line: KEY [TENANT [ROLE]]. It is read again when it changes and "
            "on SIGHUP (default: none)."
        ),
    ] = None
    admin_key: Annotated[
        tuple[str, ...],
        Field(
            description="API key of the role admin, which may use every route. Repeatable (default: none)."
        ),
    ] = ()
    metrics_key: Annotated[
        tuple[str, ...],
        Field(
            description="API key of the role metrics, which may read /metrics. Repeatable (default: none)."
        ),
    ] = ()
    metrics_port: Annotated[
        int | None,
        Field(
            ge=0,
            le=65535,
            description="Second port that serves only metrics and health, without a key (default: none).",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Field(
            description="TLS private key (PEM file). It and --ssl-certfile are read again when they change and on "
            "SIGHUP."
        ),
    ] = None
    ssl_certfile: Annotated[str | None, Field(description="TLS certificate chain (PEM file).")] = None
    max_num_queued_reqs: Annotated[
        int, Field(ge=1, description="Maximum number of waiting requests; further ones get status 503.")
    ] = 1024
    max_num_queued_tokens: Annotated[
        int,
        Field(ge=1, description="Maximum number of waiting prompt tokens; further requests get status 503."),
    ] = 4_000_000
    request_timeout: Annotated[
        float,
        Field(
            gt=0,
            description="Time after which a request ends with status 408.",
            json_schema_extra=SECONDS,
        ),
    ] = 600.0
    max_body_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum size of a request body; larger ones get status 413.",
            json_schema_extra=BYTES,
        ),
    ] = 8 << 20
    response_store: Annotated[
        str | None,
        Field(
            description="SQLite file of the responses that /v1/responses stores; one server uses it at a time "
            "(default: in memory, lost when the server ends)."
        ),
    ] = None
    response_store_bytes: Annotated[
        int,
        Field(ge=1, description="Maximum size of the stored responses.", json_schema_extra=BYTES),
    ] = 256 << 20
    mixed_embedding_ratio: Annotated[
        float,
        Field(
            ge=0,
            description="Time that embeddings may add to decoding, as a share of it; 0 sets no limit.",
        ),
    ] = 0.2
    trust_request_chat_template: Annotated[
        bool,
        Field(
            description="Render the field chat_template of requests: a template is code of the client. It runs in a "
            "process of its own with limits of time and memory. By default such a request is refused."
        ),
    ] = False
    lora_modules: Annotated[
        tuple[str, ...],
        Field(
            description="LoRA adapter that is loaded at start, as NAME=FOLDER or a JSON object with name, path and "
            "optionally base_model_name. "
            "Several after the flag, or the flag repeated (default: none)."
        ),
    ] = ()
    tool_call_parser: Annotated[
        str,
        Field(
            description="Format of the model's tool calls; auto takes the one that the chat template shows."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Field(
            description="Format of the model's reasoning; auto takes the one that the chat template shows."
        ),
    ] = "auto"
    engine_process: Annotated[
        bool,
        Field(
            description="Run the engine in a process of its own, so that HTTP and text do not slow down its steps. "
            "Use it with a GPU and many streams; it takes memory for a second Python process. If it ends, it "
            "is started again, and requests continue."
        ),
    ] = False
    api_server_count: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Number of front ends: processes that tokenize, render and stream behind one port, before one "
            "engine and its caches. Use more with many streams and free cores (default: HTTP in the server's "
            "process).",
        ),
    ] = 1
    stream_interval: Annotated[
        int,
        Field(
            ge=1,
            le=4096,
            description=(
                "Minimum tokens per chunk of a streamed response; the first token is sent at once. "
                "While writing chunks takes much of the server's time, chunks hold more tokens."
            ),
        ),
    ] = 1
    normalize_prompts: Annotated[
        tuple[str, ...],
        Field(
            description="Per-request marker that is removed from system messages or moved, so that prompts share "
            "their prefix: all, billing_header, total_tokens, current_date or git_status. Repeatable; --tenants "
            "overrides it for a tenant (default: none)."
        ),
    ] = ()
    prefix_memory_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Memory for fingerprints of recent prompts, which explain where a prompt stops matching the "
            "prefix cache; 0 disables the explanation.",
            json_schema_extra=BYTES,
        ),
    ] = 16 << 20
    explain_prompt_text: Annotated[
        bool,
        Field(
            description="Show a few words of a request's own prompt in /v1/requests/{id}, at the place where it stops "
            "matching the prefix cache."
        ),
    ] = False
    drain_timeout: Annotated[
        float,
        Field(
            ge=0,
            description="Time to finish running requests after SIGTERM.",
            json_schema_extra=SECONDS,
        ),
    ] = 30.0
    takeover_timeout: Annotated[
        float,
        Field(
            ge=0,
            description="Time to wait at start-up for a folder of --kv-offload-path or --batch-path that another "
            "process still uses, such as the one that this server replaces.",
            json_schema_extra=SECONDS,
        ),
    ] = 0.0
    metrics_prefix: Annotated[
        str,
        Field(
            pattern="^[a-zA-Z_][a-zA-Z0-9_]*$",
            description="Prefix of the metrics' names; vllm keeps existing dashboards working.",
            json_schema_extra=METRIC_NAME,
        ),
    ] = "headrace"
    record_trace: Annotated[
        str | None,
        Field(
            description="File that records all scheduler events without text or tokens, for headrace replay "
            "(default: none)."
        ),
    ] = None
    record_trace_bytes: Annotated[
        int,
        Field(ge=1, description="Maximum size of --record-trace.", json_schema_extra=BYTES),
    ] = 256 << 20


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """Experiments on settings, and the tuner."""

    tuner: Annotated[
        Literal["off", "advise", "on"],
        Field(
            description="Tune settings while serving, in small steps within bounds. advise: rehearse changes and log "
            "the better ones; on: make them."
        ),
    ] = "off"
    tuner_window: Annotated[
        float,
        Field(
            ge=1.0,
            description="Length of one measured window of the tuner; it should hold at least some tens of requests.",
            json_schema_extra=SECONDS,
        ),
    ] = 20.0

    experiments_file: Annotated[
        str | None,
        Field(
            description="JSON file of the experiments of /v1/experiments, which then continue after a restart "
            "(default: none, they are lost)."
        ),
    ] = None


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
