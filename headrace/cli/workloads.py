"""Flags of workloads and latency targets, which several commands share, and the requests that they describe."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headrace.cli.options import duration
from headrace.config import ConfigError

if TYPE_CHECKING:
    from headrace.lab.workload.dataset import Dataset, Workload
    from headrace.lab.workload.work import Call, Work


WORKLOAD = "Workload"
SLO = "Latency targets"

Export = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        metavar="FILE",
        help="File of one row per request, .csv or .parquet (default: none).",
    ),
]

LENGTHS = "a number, or a distribution such as uniform:200:400"


@dataclass(frozen=True)
class CallFlags:
    """Requests of a trace or of a synthetic workload, with arrival times and lengths but without text."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="File of recorded requests, CSV or JSON lines; the header tells the format (Azure, BurstGPT, "
            "Mooncake, ServeGen, LMSYS).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT",
            help="Tenant of a synthetic workload: tenant=NAME,rate=R,arrivals=poisson|bursty:S|mmpp:X:S|diurnal,"
            f"prompt=LENGTHS,answer=LENGTHS,turns=N,system=TOKENS,class=NAME, where LENGTHS is {LENGTHS}. Repeatable.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of requests (default: all of a trace, 1000 of a synthetic workload).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    speedup: Annotated[
        float, typer.Option(help="Factor by which requests arrive faster.", rich_help_panel=WORKLOAD)
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of all random draws.", rich_help_panel=WORKLOAD)] = 0

    def calls(self) -> Iterator[Call]:
        """The requests from the beginning; raises the errors of `read_calls`."""
        return read_calls(self.trace, self.workload or (), self.requests, self.speedup, self.seed)

    def describe(self) -> str:
        """The load in a few words, for titles."""
        source = self.trace.name if self.trace else ", ".join(self.workload or ())
        faster = f", {self.speedup:g} times as fast" if self.speedup != 1 else ""
        return f"{source}{faster}"


@dataclass(frozen=True)
class SimulatedCallFlags(CallFlags):
    """The requests of a simulation: they may be resampled, and limited as clients do."""

    resample: Annotated[
        bool,
        typer.Option(
            "--resample", help="Draw --requests from the trace with replacement.", rich_help_panel=WORKLOAD
        ),
    ] = False
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Field max_tokens of every request; outputs end where the workload says (default: no limit).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None

    def calls(self) -> Iterator[Call]:
        return read_calls(
            *(self.trace, self.workload or (), self.requests, self.speedup, self.seed), resample=self.resample
        )


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
    from headrace.lab.workload.traces import BadTrace, read_trace
    from headrace.lab.workload.work import resampled, speedup

    if (trace is None) == (not workload):
        raise ConfigError("give the requests with either --trace FILE or --workload (see --help)")
    if resample and (trace is None or requests is None):
        raise ConfigError("--resample draws --requests from a --trace: it needs both")
    try:
        if trace is None:
            tenants = [population.parse(text) for text in workload]
            calls = population.calls(tenants, requests or 1000, seed)
        elif resample:
            calls = iter(resampled(list(read_trace(trace)), requests or 0, seed))
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


@dataclass(frozen=True)
class TargetFlags:
    """Latency targets of a simulation's requests."""

    slo_ttft: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="TTFT target of every request: the scheduler orders by it, and goodput counts it (default: none).",
            rich_help_panel=SLO,
        ),
    ] = None
    slo_tpot: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="TPOT target of every request, time per token after the first (default: none).",
            rich_help_panel=SLO,
        ),
    ] = None
    slo_e2e: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Target for the whole request; goodput counts it, the scheduler has no such target (default: none).",
            rich_help_panel=SLO,
        ),
    ] = None

    @property
    def slo(self) -> dict[str, float]:
        """The targets that are given, in seconds by quantity."""
        targets = {"ttft": self.slo_ttft, "tpot": self.slo_tpot, "e2e": self.slo_e2e}
        return {name: seconds for name, seconds in targets.items() if seconds is not None}


DatasetName = Annotated[
    str,
    typer.Option(
        help="Workload: high-variance, high-variance-chats, fixed, log-normal, shared-prefix, jsonl, trace, "
        "or your own class, MODULE:CLASS.",
        rich_help_panel=WORKLOAD,
    ),
]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens per prompt.", rich_help_panel=WORKLOAD)]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens per output.", rich_help_panel=WORKLOAD)]
WorkloadSeed = Annotated[
    int, typer.Option(help="Seed of the workload.", rich_help_panel=WORKLOAD, show_default=True)
]


@dataclass(frozen=True)
class PromptFlags:
    """Requests with prompts; the command says how many."""

    dataset_name: DatasetName = "high-variance"
    dataset_path: Annotated[
        str | None, typer.Option(help="File of the workload jsonl or trace.", rich_help_panel=WORKLOAD)
    ] = None
    input_len: InputLen = 24
    output_len: OutputLen = 128
    prefix_len: Annotated[
        int,
        typer.Option(min=1, help="Tokens that the prompts of shared-prefix share.", rich_help_panel=WORKLOAD),
    ] = 1000
    workload_seed: WorkloadSeed = 0

    def dataset(self, count: int) -> Dataset:
        """The workload of ``count`` requests, not drawn yet."""
        from headrace.lab.workload.dataset import Dataset

        lengths = (self.input_len, self.output_len, self.prefix_len)
        return Dataset(self.dataset_name, self.dataset_path, count, *lengths, self.workload_seed)


@dataclass(frozen=True)
class CountedFlags(PromptFlags):
    """Requests with prompts, all due at once."""

    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests.", rich_help_panel=WORKLOAD)] = (
        300
    )

    def counted(self) -> Dataset:
        """The workload, not drawn yet."""
        return self.dataset(self.num_prompts)


@dataclass(frozen=True)
class ArrivingFlags(CountedFlags):
    """Requests with prompts that arrive over time."""

    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests per second, as a Poisson process; inf sends all at once.", rich_help_panel=WORKLOAD
        ),
    ] = math.inf
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Regularity of the arrivals: 1 is Poisson, below 1 is burstier, above 1 more regular.",
            rich_help_panel=WORKLOAD,
        ),
    ] = 1.0

    def counted(self) -> Dataset:
        return replace(super().counted(), rate=self.request_rate, burstiness=self.burstiness)


@dataclass(frozen=True)
class MeasureFlags:
    """What a benchmark run needs beside its workload, and the files that it writes."""

    warmup: Annotated[
        int, typer.Option(min=0, help="Number of requests that run first and are not measured.")
    ] = 4
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:DURATION",
            help="Latency target that counts towards goodput, for example ttft:500ms, tpot:0.1, itl:200ms or e2e:10s. "
            "Repeatable.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            writable=True,
            help="JSON file of the report; a PNG is written beside it (default: in bench-results/).",
        ),
    ] = None
    export: Export = None

    @property
    def slo(self) -> dict[str, float]:
        """The latency targets of ``--goodput``."""
        return read_slo(self.goodput)


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


def _plugged_in(name: str) -> Workload | None:
    """The workload class that a dataset's name refers to (``MODULE:CLASS``); None for a built-in dataset."""
    from headrace.lab.workload.dataset import DATASETS, Workload
    from headrace.wiring.plugins import Port, make_plugin

    port = Port("--dataset-name", "headrace.workloads", Workload, DATASETS)
    return None if name in DATASETS else cast("Workload", make_plugin(port, name))


def read_slo(given: Sequence[str] | None, flag: str = "--goodput") -> dict[str, float]:
    """Latency targets in seconds, by quantity, from the values of ``flag``.

    Raises:
        ConfigError: a value cannot be parsed.
    """
    from headrace.config.values import parse_duration
    from headrace.lab.bench.stats import SLO_NAMES

    slo: dict[str, float] = {}
    for bound in (part for text in given or () for part in text.split()):
        name, colon, duration = bound.partition(":")
        try:
            seconds = parse_duration(duration)
        except ValueError:
            seconds = 0.0
        if not colon or name not in SLO_NAMES or not 0 < seconds < math.inf:
            names = ", ".join(SLO_NAMES)
            raise ConfigError(
                f"{flag} {bound}: expected NAME:DURATION with NAME one of {names} and a DURATION above 0, "
                "for example ttft:500ms"
            )
        if slo.setdefault(name, seconds) != seconds:
            raise ConfigError(f"{flag} {bound}: {name} already has the target {1e3 * slo[name]:g} ms")
    return slo
