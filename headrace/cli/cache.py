"""``headrace cache``: what the response caches need to be told before a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from headrace.core.cache.calibration import Calibration
    from headrace.core.cache.certify import Certificate

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
    from headrace.compute.encoder.sentences import Sentences
    from headrace.compute.model.spec import ModelError
    from headrace.config import ConfigError
    from headrace.core.cache.calibration import Unsupported
    from headrace.core.cache.certify import CONFIDENCE, Certificate
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
    certified: dict[float, Certificate | str] = {}
    for bound in sorted({max_error, *_SHOWN}):
        try:
            certified[bound] = calibration.certificate(bound, CONFIDENCE)
        except Unsupported as error:
            certified[bound] = str(error)
    found = [each for each in certified.values() if isinstance(each, Certificate)]
    console.print(_curve(calibration, found))
    for bound, each in certified.items():
        verdict = each if isinstance(each, str) else _told(each, calibration)
        console.print(f"at most {bound:.3g} wrong: {verdict}")
    if plot is not None:
        try:
            plot_calibration(calibration, found, CONFIDENCE, plot, f"{rows.name}, {sentences.name}")
        except NoPlots as error:
            raise ConfigError(str(error)) from error
    if isinstance(certified[max_error], str):
        raise ConfigError(f"nothing written: {certified[max_error]}")
    output.write_text(calibration.to_text(), encoding="utf-8")
    console.print(f"wrote {output}: headrace serve --semantic-cache serve --semantic-calibration {output}")


def _told(certificate: Certificate, calibration: Calibration) -> str:
    _, served, wrong = certificate.tally
    share = served / calibration.held_rows
    return f"{share:.1%} of the questions served, {wrong} of {served} wrong, bound {certificate.bound:.2%}"


def _curve(calibration: Calibration, certified: Sequence[Certificate]) -> Table:
    from headrace.core.cache.certify import CONFIDENCE, upper_error

    table = Table("threshold", "served", "wrong", f"bound at {CONFIDENCE:.0%}", "", box=None)
    marks = {each.tally.threshold for each in certified}
    for threshold, served, wrong in calibration.held:
        table.add_row(
            f"{threshold:.2f}",
            f"{served / calibration.held_rows:.1%}",
            f"{wrong / served:.2%}" if served else "-",
            f"{upper_error(wrong, served, CONFIDENCE):.2%}",
            "certified" if threshold in marks else "",
        )
    return table
