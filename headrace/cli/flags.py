"""Flags of workloads and of simulated machines, which several commands share, and what they describe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headrace.cli.options import duration
from headrace.config import ConfigError, SchedulerOptions
from headrace.lab.forced_acceptance import BadRates, Speculation, rates_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from headrace.lab.simulate.fleet import Wire
    from headrace.lab.workload.call import Call
    from headrace.lab.workload.dataset import Dataset
    from headrace.lab.workload.dataset import Workload as DrawnWorkload
    from headrace.lab.workload.work import Work


MACHINE = "Machine"
WORKLOAD = "Workload"
SLO = "Latency targets"
DRAFTS = "Speculative decoding"

DEVICES = (
    "A100-80G, H100-SXM, H200, B200, L40S, L4, A10G, MI300X, cpu, or a .json file with a device of your own"
)
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


PANEL = "Workload"

DatasetName = Annotated[
    str,
    typer.Option(
        help="Workload: high-variance, high-variance-chats, fixed, log-normal, shared-prefix, jsonl, trace, "
        "or your own class, MODULE:CLASS.",
        rich_help_panel=PANEL,
    ),
]
DatasetPath = Annotated[
    str | None, typer.Option(help="File of the workload jsonl or trace.", rich_help_panel=PANEL)
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of requests.", rich_help_panel=PANEL)]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens per prompt.", rich_help_panel=PANEL)]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens per output.", rich_help_panel=PANEL)]
PrefixLen = Annotated[
    int, typer.Option(min=1, help="Tokens that the prompts of shared-prefix share.", rich_help_panel=PANEL)
]
WorkloadSeed = Annotated[
    int, typer.Option(help="Seed of the workload.", rich_help_panel=PANEL, show_default=True)
]
RequestRate = Annotated[
    float,
    typer.Option(
        help="Requests per second, as a Poisson process; inf sends all at once.", rich_help_panel=PANEL
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        min=0.01,
        help="Regularity of the arrivals: 1 is Poisson, below 1 is burstier, above 1 more regular.",
        rich_help_panel=PANEL,
    ),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:DURATION",
        help="Latency target that counts towards goodput, for example ttft:500ms, tpot:0.1, itl:200ms or e2e:10s. "
        "Repeatable.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        help="JSON file of the report; a PNG is written beside it (default: in bench-results/).",
    ),
]
Warmup = Annotated[int, typer.Option(min=0, help="Number of requests that run first and are not measured.")]


def draw(dataset: Dataset) -> Sequence[Work]:
    """The requests of a workload.

    Raises:
        ConfigError: an unknown workload, a file that cannot be read, or an invalid rate.
    """
    from headrace.lab.workload.dataset import BadDataset, BadLine

    if not dataset.rate > 0:
        raise ConfigError(f"--request-rate {dataset.rate}: expected a number above 0")
    if dataset.burstiness == math.inf:  # no gaps could be drawn
        raise ConfigError("--burstiness inf: expected a finite number")
    try:
        work: Sequence[Work] = dataset.draw(_plugged_in(dataset.name))
    except OSError as error:
        raise ConfigError(
            f"--dataset-path {dataset.path}: {(error.strerror or str(error)).lower()}"
        ) from None
    except (BadDataset, BadLine) as error:
        raise ConfigError(str(error)) from None
    return work


def _plugged_in(name: str) -> DrawnWorkload | None:
    """The workload class that a dataset's name refers to (``MODULE:CLASS``); None for a built-in dataset."""
    from headrace.lab.workload.dataset import DATASETS, Workload
    from headrace.wiring.plugins import Port, make_plugin

    port = Port("--dataset-name", "headrace.workloads", Workload, DATASETS)
    return None if name in DATASETS else cast("DrawnWorkload", make_plugin(port, name))


def read_slo(goodput: Sequence[str] | None, flag: str = "--goodput") -> dict[str, float]:
    """Latency targets in seconds, by quantity, from the values of ``flag``.

    Raises:
        ConfigError: a value cannot be parsed.
    """
    from headrace.config.values import parse_duration
    from headrace.lab.bench.stats import SLO_NAMES

    slo = {}
    for bound in (part for text in goodput or () for part in text.split()):
        name, colon, duration = bound.partition(":")
        try:
            slo[name] = parse_duration(duration)
        except ValueError:
            colon = ""
        if not colon or name not in SLO_NAMES or not slo[name] > 0:
            names = ", ".join(SLO_NAMES)
            raise ConfigError(
                f"{flag} {bound}: expected NAME:DURATION with NAME one of {names} and a DURATION above 0, "
                "for example ttft:500ms"
            )
    return slo


ADAPTIVE = '{"method": "ngram"}'
"""Default of ``--speculative-config`` with ``--acceptance``: adaptive draft lengths. The method is ignored."""


def read_speculation(acceptance: str | None, cost: float) -> Speculation | None:
    """Speculation from the flags: acceptance rates as numbers, or from a trace of ``--record-trace``.

    Raises:
        ConfigError: invalid rates, a cost without ``--acceptance``, or a trace without verified drafts.
    """
    if acceptance is None:
        if cost:
            raise ConfigError(f"--draft-cost {cost:g} requires --acceptance: without it nothing is drafted")
        return None
    path = Path(acceptance)
    try:
        rates = _recorded(path) if path.is_file() else rates_of(acceptance)
    except BadRates as error:
        raise ConfigError(f"--acceptance: {error}, or the file of a recorded trace") from None
    return Speculation(rates, cost)


def _recorded(path: Path) -> tuple[float, ...]:
    from headrace.lab.replay.rerun import recorded_rates
    from headrace.lab.replay.trace import BadTrace, read_trace

    try:
        rates = recorded_rates(read_trace(path))
    except OSError as error:
        raise ConfigError(
            f"--acceptance {path} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except BadTrace as error:
        raise ConfigError(f"--acceptance: {error}") from None
    if not rates:
        raise ConfigError(f"--acceptance {path}: no drafts were verified in this trace")
    return rates


def with_speculation(plans: SchedulerOptions, speculation: Speculation | None) -> SchedulerOptions:
    """The options with speculative decoding as given by the flags.

    Raises:
        ConfigError: ``--speculative-config`` without ``--acceptance``.
    """
    if speculation is None:
        if plans.speculative_config is not None:
            raise ConfigError(
                "--speculative-config: a simulation has no text to draft from; set --acceptance, for example to 0.7"
            )
        return plans
    return dataclasses.replace(plans, speculative_config=plans.speculative_config or ADAPTIVE)


def wire_of(gigabytes: float, latency: float, at_once: bool, degree: int) -> Wire:
    """The connection of a replica of ``degree`` devices."""
    from headrace.lab.simulate.fleet import Wire

    return Wire(latency, 1e9 * gigabytes * degree, at_once)


def read_calls(
    trace: Path | None,
    workload: Collection[str],
    requests: int | None,
    faster: float,
    seed: int,
    *,
    resample: bool = False,
    trace_flag: str = "--trace",
) -> Iterator[Call]:
    """The requests of a trace or of a synthetic workload, as the flags say; errors name the trace by ``trace_flag``.

    Raises:
        ConfigError: neither or both flags, or a file that cannot be read or has no requests. A bad line is reported
            when it is reached.
    """
    from headrace.lab.workload import population
    from headrace.lab.workload.call import resampled, speedup
    from headrace.lab.workload.traces import BadTrace, read_trace

    if (trace is None) == (not workload):
        raise ConfigError("give the requests with either --trace FILE or --workload (see --help)")
    if resample and (trace is None or requests is None):
        raise ConfigError("--resample draws --requests from a --trace: it needs both")
    calls: Iterable[Call]
    try:
        if trace is None:
            tenants = [population.parse(text) for text in workload]
            calls = population.calls(tenants, requests or 1000, seed)
        elif resample:
            calls = resampled(list(read_trace(trace)), requests or 0, seed)
        else:
            with trace.open():  # a missing file is reported now, not in the middle
                calls = read_trace(trace, requests)
        return _readable(speedup(calls, faster), f"{trace_flag} {trace}")
    except OSError as error:
        raise ConfigError(
            f"{trace_flag} {trace} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except (BadTrace, population.BadPopulation, ValueError) as error:
        raise ConfigError(str(error)) from None


def _readable(calls: Iterator[Call], source: str) -> Iterator[Call]:
    from headrace.lab.workload.traces import BadTrace

    empty = True
    try:
        for call in calls:
            empty = False
            yield call
    except BadTrace as error:
        raise ConfigError(str(error)) from None
    if empty:
        raise ConfigError(f"{source} has no requests with a prompt and an output")
