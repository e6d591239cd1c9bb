"""``headrace cache``: what the response caches need to be told before a server starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.core.cache.semantic.calibration import Calibration

cache_app = typer.Typer(help="Response caches: calibrate the semantic one.", no_args_is_help=True)

_SHOWN = (0.01, 0.02, 0.05)


@cache_app.callback()
def cache() -> None:
    """Response caches: calibrate the semantic one."""


@cache_app.command()
def calibrate(
    rows: Annotated[
        Path, typer.Argument(help="CSV of text_a,text_b,same or of query,intent; or JSON of the latter")
    ],
    output: Annotated[Path, typer.Option(help="calibration to write")] = Path("semantic-calibration.json"),
    max_error: Annotated[float, typer.Option(help="share of served answers that may be wrong")] = 0.01,
    encoder: Annotated[
        str, typer.Option(help="sentence-transformers folder or hub name; default: the one of the extra")
    ] = "all-MiniLM-L6-v2",
    plot: Annotated[Path | None, typer.Option(help="PNG of the curve")] = None,
    seed: Annotated[int, typer.Option(help="of the split and of the order of a stream")] = 0,
) -> None:
    """Fit the semantic cache's judge on labelled questions and certify a threshold.

    A part of the rows fits the score, the others, which it has not seen, prove what it may promise. Nothing is written
    where they cannot prove it.
    """
    from rich.console import Console

    from headrace.cli.output import writing
    from headrace.compute.encoder.sentences import Sentences
    from headrace.compute.model.spec import ModelError
    from headrace.config import ConfigError
    from headrace.core.cache.semantic.bounds import CONFIDENCE
    from headrace.core.cache.semantic.calibration import Unsupported
    from headrace.lab.bench.plot import NoPlots
    from headrace.lab.semantic.calibrate import calibrate as fit
    from headrace.lab.semantic.plot import plot_calibration
    from headrace.lab.semantic.rows import BadRows, read_rows

    if not 0 < max_error < 1:
        raise ConfigError("--max-error must be between 0 and 1")
    console = Console(soft_wrap=True)
    try:
        data = read_rows(rows)
        sentences = Sentences.from_name(encoder)
        console.print(f"{len(data.rows)} rows of {rows}; a minute or two for each ten thousand")
        calibration = fit(data, sentences.embed, sentences.name, seed)
    except (BadRows, ModelError, Unsupported) as error:
        raise ConfigError(str(error)) from error
    for bound in sorted({max_error, *_SHOWN}):
        console.print(_told(calibration, bound))
    console.print(_curve(calibration, max_error))
    if plot is not None:
        try:
            plot_calibration(calibration, [max_error], CONFIDENCE, plot, f"{rows.name}, {sentences.name}")
        except NoPlots as error:
            raise ConfigError(str(error)) from error
        except (OSError, ValueError) as error:  # ValueError: a kind of picture that matplotlib does not draw
            raise ConfigError(f"--plot {plot}: {error}") from error
    try:
        calibration.rules(max_error, CONFIDENCE)
    except Unsupported as error:
        raise ConfigError(f"nothing written: {error}") from error
    with writing("--output", output):
        output.write_text(calibration.to_text(), encoding="utf-8")
    console.print(f"wrote {output}: headrace serve --semantic-cache serve --semantic-calibration {output}")


def _told(calibration: Calibration, max_error: float) -> str:
    """What can be promised, by size of the cache."""
    from headrace.core.cache.semantic.bounds import CONFIDENCE, Certificate

    lines = [f"at most {max_error:.3g} of the served answers wrong, {CONFIDENCE:.0%} confidence:"]
    found = calibration.certificates(max_error, CONFIDENCE)
    for stratum, each in zip(calibration.strata, found, strict=True):
        verdict = f"not proved: {each}"
        if isinstance(each, Certificate):
            _, served, wrong = each.tally
            share = served / stratum.held_rows
            verdict = f"{share:.1%} served, {wrong} of {served} wrong, at most {each.bound:.2%}"
        lines.append(f"  {_name(stratum.entries)}: {verdict}")
    return "\n".join(lines)


def _curve(calibration: Calibration, max_error: float) -> Table:
    from rich.table import Table

    from headrace.core.cache.semantic.bounds import CONFIDENCE, Certificate, upper_error

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
