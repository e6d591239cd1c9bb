"""Flags that ``headrace simulate`` and ``headrace plan`` share: machine, workload, latency targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import duration

MACHINE = "Machine"
WORKLOAD = "Workload"
SLO = "Latency targets"
DRAFTS = "Speculative decoding"

DEVICES = "A100-80G, H100-SXM, H200, MI300X or cpu"
TRANSFER_GIGABYTES, TRANSFER_SECONDS = 25.0, 0.006
"""Defaults of ``--transfer-bandwidth`` and ``--transfer-latency``; `headrace.wiring.simulation.WIRE` explains them."""
LENGTHS = "a number, or a distribution such as uniform:200:400"

Shape = Annotated[
    str,
    typer.Argument(
        help="Model: the name of a known shape such as llama-3.1-8b, or a folder or Hugging Face name with a "
        "config.json (default: llama-3.1-8b).",
        show_default=False,
        metavar="MODEL",
    ),
]
Weights = Annotated[
    str, typer.Option(help="Data type of the weights: bfloat16, int8 or int4.", rich_help_panel=MACHINE)
]
Kv = Annotated[
    str, typer.Option(help="Data type of the KV cache: bfloat16 or int8.", rich_help_panel=MACHINE)
]
Device = Annotated[str, typer.Option(help=f"Device: {DEVICES}.", rich_help_panel=MACHINE)]
Degree = Annotated[
    int, typer.Option(min=1, help="Devices per replica (tensor parallelism).", rich_help_panel=MACHINE)
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help="Calibration of a real machine, made by headrace bench calibrate; replaces MODEL and --device.",
        rich_help_panel=MACHINE,
    ),
]
Front = Annotated[
    bool,
    typer.Option(
        help="Simulate the HTTP server of a --calibration too, not only its engine.", rich_help_panel=MACHINE
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Maximum context length in tokens, prompt plus output (default: what the memory holds).",
        rich_help_panel=MACHINE,
    ),
]
Replicas = Annotated[
    int, typer.Option(min=1, help="Number of engines behind a router.", rich_help_panel=MACHINE)
]
Routing = Annotated[
    str,
    typer.Option(
        help="Routing policy: least-loaded, round-robin or prefix-affinity.", rich_help_panel=MACHINE
    ),
]
PrefillReplicas = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        help="How many of --replicas only compute prompts for the others, which pull the KV blocks (P/D). Repeatable: "
        "each number is simulated and compared (default: none, all do both).",
        rich_help_panel=MACHINE,
    ),
]
TransferBandwidth = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="GB/S",
        help="Bandwidth of a device for KV blocks of other replicas, in GB per second.",
        rich_help_panel=MACHINE,
    ),
]
TransferLatency = Annotated[
    float,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="Time from the end of a prefill until the decode replica has the request and can pull.",
        rich_help_panel=MACHINE,
    ),
]
TransferAtOnce = Annotated[
    bool,
    typer.Option(
        "--transfer-at-once",
        help="Both replicas get a request at the same time, and blocks are pulled while the prompt is computed; the "
        "latency begins at the arrival.",
        rich_help_panel=MACHINE,
    ),
]
MaxQueuedReqs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of waiting requests per replica; further ones are rejected (default: no limit).",
        rich_help_panel=MACHINE,
    ),
]
MaxQueuedTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of waiting prompt tokens per replica (default: no limit).",
        rich_help_panel=MACHINE,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="File of recorded requests, CSV or JSON lines; the header tells the format (Azure, BurstGPT, "
        "Mooncake, ServeGen, LMSYS).",
        rich_help_panel=WORKLOAD,
    ),
]
Workload = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TENANT",
        help="Tenant of a synthetic workload: tenant=NAME,rate=R,arrivals=poisson|bursty:S|mmpp:X:S|diurnal,"
        f"prompt=LENGTHS,answer=LENGTHS,turns=N,system=TOKENS,class=NAME, where LENGTHS is {LENGTHS}. Repeatable.",
        rich_help_panel=WORKLOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of requests (default: all of a trace, 1000 of a synthetic workload).",
        rich_help_panel=WORKLOAD,
    ),
]
Resample = Annotated[
    bool,
    typer.Option(
        "--resample", help="Draw --requests from the trace with replacement.", rich_help_panel=WORKLOAD
    ),
]
Speedup = Annotated[
    float, typer.Option(help="Factor by which requests arrive faster.", rich_help_panel=WORKLOAD)
]
Experiment = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Run an experiment, as headrace experiment start does on a server, in virtual time (default: none).",
        rich_help_panel=WORKLOAD,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Field max_tokens of every request; outputs end where the workload says (default: no limit).",
        rich_help_panel=WORKLOAD,
    ),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        metavar="RATES",
        help="Simulate speculative decoding: probability that a drafted token is accepted, 0.7 or by position "
        "0.8,0.6,0.5, or a file recorded by headrace serve --record-trace (default: no drafts).",
        rich_help_panel=DRAFTS,
    ),
]
DraftCost = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Time of drafting a token as a share of a decode step, for a draft model.",
        rich_help_panel=DRAFTS,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of all random draws.", rich_help_panel=WORKLOAD)]
SloTtft = Annotated[
    float | None,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="TTFT target of every request: the scheduler orders by it, and goodput counts it (default: none).",
        rich_help_panel=SLO,
    ),
]
SloTpot = Annotated[
    float | None,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="TPOT target of every request, time per token after the first (default: none).",
        rich_help_panel=SLO,
    ),
]
SloE2e = Annotated[
    float | None,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="Target for the whole request; goodput counts it, the scheduler has no such target (default: none).",
        rich_help_panel=SLO,
    ),
]
Plot = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for plots (default: none).")]
Output = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False, writable=True, metavar="FILE", help="JSON file of the results (default: none)."
    ),
]
Export = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        metavar="FILE",
        help="File of one row per request, .csv or .parquet (default: none).",
    ),
]
