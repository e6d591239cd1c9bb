"""``headrace cache``: calibration of the semantic cache, and an estimate of what all caches would save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.connection import DEFAULT_URL, asked, call_raw
from headrace.cli.estimate import estimate
from headrace.cli.help import CONTEXT, Command, Group
from headrace.config import ConfigError
from headrace.files import replace_text

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.response_cache.rules.calibration import Calibration

cache_app = typer.Typer(
    cls=Group,
    help="Estimate what the caches would save, and calibrate the semantic cache.",
    no_args_is_help=True,
    context_settings=CONTEXT,
    rich_markup_mode=None,
)

_SHOWN = (0.01, 0.02, 0.05)


@cache_app.callback()
def cache() -> None:
    """Estimate what the caches would save, and calibrate the semantic cache."""


cache_app.command(cls=Command, context_settings=CONTEXT)(estimate)

Rows = Annotated[
    Path,
    typer.Argument(
        metavar="ROWS",
        help="Labelled requests: a CSV file with text_a,text_b,same or with query,intent, or JSON of the latter.",
    ),
]
Output = Annotated[
    Path, typer.Option(dir_okay=False, writable=True, metavar="FILE", help="Calibration file to write.")
]
MaxError = Annotated[
    float, typer.Option(help="Maximum share of wrong responses among those served, above 0 and below 1.")
]
Encoder = Annotated[
    str, typer.Option(help="Sentence-transformers folder or Hugging Face name of the encoder.")
]
SecondJudge = Annotated[
    str | None,
    typer.Option(
        "--judge",
        help="Folder or Hugging Face name of a cross-encoder that must call two requests the same before one is "
        "served with the response of the other (default: none).",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False, writable=True, metavar="FILE", help="PNG of error against hit rate (default: none)."
    ),
]


def _cosines(given: list[float] | None) -> list[float]:
    from headrace.config import ConfigError

    if any(not 0 < each <= 1 for each in given or ()):
        raise ConfigError("--threshold: expected a cosine above 0 and at most 1")
    return given or []


Thresholds = Annotated[
    list[float] | None,
    typer.Option(
        "--threshold",
        callback=_cosines,
        help="Cosine to serve from, as in --semantic-threshold: count its errors too, without a certificate. "
        "Repeatable (default: none).",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the split and of the order of the requests.")]


@cache_app.command(cls=Command, context_settings=CONTEXT)
def calibrate(
    rows: Rows,
    output: Output = Path("semantic-calibration.json"),
    max_error: MaxError = 0.01,
    encoder: Encoder = "all-MiniLM-L6-v2",
    second: SecondJudge = None,
    plot: Plot = None,
    seed: Seed = 0,
    threshold: Thresholds = None,
) -> None:
    """Fit the semantic cache's threshold on labelled requests and certify its error bound.

    One part of the rows fits the score. The others, which the fit does not use, certify the error bound. Without
    --threshold, no file is written if the bound cannot be certified.
    """
    from rich.console import Console

    from headrace.cli.output import progress, writing
    from headrace.compute.checkpoint import ModelError
    from headrace.compute.encoder.sentences import PairJudge, Sentences
    from headrace.config import ConfigError
    from headrace.response_cache.rules.calibration import CONFIDENCE, Unsupported
    from headrace.response_cache.semantic.calibrate import calibrate as fit
    from headrace.response_cache.semantic.labelled import BadRows, read_rows

    if not 0 < max_error < 1:
        raise ConfigError(f"--max-error: expected a number above 0 and below 1, got {max_error:g}")
    console = Console(soft_wrap=True)
    try:
        data = read_rows(rows)
        with progress(f"loading {encoder}"):
            sentences = Sentences.from_name(encoder)
            judge = None if second is None else PairJudge.from_name(second)
        console.print(
            f"{len(data.rows)} rows of {rows}; calibration takes one or two minutes per 10,000 rows"
        )
        with progress(f"calibrating on {rows}"):
            calibration = fit(data, sentences.embed, sentences.name, seed, judge, threshold or ())
    except (BadRows, ModelError, Unsupported) as error:
        raise ConfigError(str(error)) from error
    for bound in sorted({max_error, *_SHOWN}):
        console.print(_bounds_text(calibration, bound))
    console.print(_curve(calibration, max_error))
    if plot is not None:
        _plot(calibration, max_error, plot, f"{rows.name}, {sentences.name}")
    try:
        calibration.rules(max_error, CONFIDENCE)
    except Unsupported as error:
        if not threshold:
            raise ConfigError(f"no calibration was written: {error}") from error
        console.print(f"not certified: {error}")
    for each in sorted(set(threshold or ())):
        console.print(_claims_text(calibration, each))
    with writing("--output", output):
        replace_text(output, calibration.to_text())
    console.print(
        f"written: {output}; next: headrace serve --semantic-cache serve --semantic-calibration {output}"
        + ("" if second is None else f" --semantic-judge {second}")
    )


def _plot(calibration: Calibration, max_error: float, path: Path, title: str) -> None:
    """Writes the plot.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    from headrace.cli.output import writing
    from headrace.config import ConfigError
    from headrace.plots import NoPlots
    from headrace.response_cache.rules.calibration import CONFIDENCE
    from headrace.response_cache.semantic.calibrate import plot_calibration

    try:
        with writing("--plot", path):
            plot_calibration(calibration, [max_error], CONFIDENCE, path, title)
    except NoPlots as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        raise
    except ValueError as error:  # a format that matplotlib does not write
        raise ConfigError(f"--plot {path}: {error}") from error


def _bounds_text(calibration: Calibration, max_error: float) -> str:
    """The certified error bounds by cache size, as text."""
    from headrace.response_cache.rules.calibration import CONFIDENCE, Certificate

    lines = [f"error bound {max_error:.3g} of the served responses, {CONFIDENCE:.0%} confidence:"]
    found = calibration.certificates(max_error, CONFIDENCE)
    for stratum, each in zip(calibration.strata, found, strict=True):
        verdict = f"not certified: {each}"
        if isinstance(each, Certificate):
            _, served, wrong = each.tally
            share = served / stratum.held_rows
            verdict = f"{share:.1%} served, {wrong} of {served} wrong, at most {each.bound:.2%}"
        lines.append(f"  {_name(stratum.entries)}: {verdict}")
    return "\n".join(lines)


def _claims_text(calibration: Calibration, cosine: float) -> str:
    """What the rows show about a threshold by hand, as text."""
    from headrace.response_cache.rules.calibration import CONFIDENCE

    lines = [f"from a cosine of {cosine:g} on, {CONFIDENCE:.0%} confidence:"]
    for entries, (_, served, wrong), bound in calibration.claims(cosine, CONFIDENCE):
        lines.append(f"  {_name(entries)}: {wrong} of {served} served are wrong, at most {bound:.2%}")
    return "\n".join(lines)


def _curve(calibration: Calibration, max_error: float) -> Table:
    from rich.table import Table

    from headrace.response_cache.rules.calibration import CONFIDENCE, Certificate, upper_error

    table = Table("cache", "threshold", "served", "wrong", f"bound at {CONFIDENCE:.0%}", "", box=None)
    found = calibration.certificates(max_error, CONFIDENCE)
    for stratum, each in zip(calibration.strata, found, strict=True):
        chosen = each.tally.threshold if isinstance(each, Certificate) else None
        for threshold, served, wrong in stratum.held:
            table.add_row(
                _name(stratum.entries),
                f"{threshold:.2f}",
                f"{served / stratum.held_rows:.1%}",
                f"{wrong / served:.2%}" if served else "-",
                f"{upper_error(wrong, served, CONFIDENCE):.2%}",
                "certified" if threshold == chosen else "",
            )
    return table


def _name(entries: int) -> str:
    return f"{entries}+ entries"


# Pairs of similar requests of a running server, to label, and their labels.

PAIRS = "/v1/cache/pairs"

_PAIRS_HELP = "Export pairs of similar requests to label, and import their labels."
pairs_app = typer.Typer(
    cls=Group, help=_PAIRS_HELP, no_args_is_help=True, context_settings=CONTEXT, rich_markup_mode=None
)


@pairs_app.callback()
def pairs() -> None:
    """Export pairs of similar requests to label, and import their labels."""


cache_app.add_typer(pairs_app, name="pairs")

File = Annotated[Path, typer.Argument(metavar="FILE", help="File of JSON lines, one pair a line.")]
Tenant = Annotated[str | None, typer.Option(help="Only the pairs of this tenant (default: all).")]
Url = Annotated[str, typer.Option(help="Address of the server.")]
Key = Annotated[str | None, typer.Option(help="Admin API key of the server (default: none).")]


@pairs_app.command("export", cls=Command, context_settings=CONTEXT)
def export(file: File, tenant: Tenant = None, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Write the pairs that a server recorded, both questions and no answers, to a file.

    Set "label" in each line to "same" if one answer serves both questions, else to "different". Lines without a label
    are left out by the import.
    """
    from headrace.cli.output import writing
    from headrace.files import PRIVATE_FILE, replace_text

    query = {} if tenant is None else {"tenant": tenant}
    answer = asked(url, api_key, lambda client: call_raw(client, "GET", PAIRS, query=query))
    with writing("FILE", file):
        replace_text(file, answer.text, PRIVATE_FILE)
    print(f"written      {len(answer.text.splitlines())} pairs to {file}")


@pairs_app.command("import", cls=Command, context_settings=CONTEXT)
def import_labels(file: File, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Send labelled pairs to a server with --semantic-labels.

    A tenant whose labels prove a threshold gets its own certificate.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {(error.strerror or str(error)).lower()}") from error
    done = asked(url, api_key, lambda client: call_raw(client, "POST", PAIRS, content=content)).json()
    print(
        f"imported     {done['stored']} labels, {done['others']} of pairs that are not served, "
        f"{done['without_label']} lines without a label"
    )
