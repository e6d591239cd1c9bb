"""The workload flags of ``headrace bench``, and the workload and latency targets that they describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headrace.config import ConfigError

if TYPE_CHECKING:
    from headrace.lab.workload import Work
    from headrace.lab.workload.dataset import Dataset, Workload

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
Output = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        help="JSON file of the report; a PNG is written beside it (default: in bench-results/).",
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


def _plugged_in(name: str) -> Workload | None:
    """The workload class that a dataset's name refers to (``MODULE:CLASS``); None for a built-in dataset."""
    from headrace.lab.workload.dataset import DATASETS, Workload
    from headrace.wiring.plugins import Port, make_plugin

    port = Port("--dataset-name", "headrace.workloads", Workload, DATASETS)
    return None if name in DATASETS else cast("Workload", make_plugin(port, name))


def read_slo(goodput: Sequence[str] | None, flag: str = "--goodput") -> dict[str, float]:
    """Latency targets in seconds, by quantity, from the values of ``flag``.

    Raises:
        ConfigError: a value cannot be parsed.
    """
    from headrace.config.quantities import parse_duration
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
