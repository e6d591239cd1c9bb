"""``headrace quantize``: a model in fewer bits, and what that costs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.config import ConfigError

if TYPE_CHECKING:
    from headrace.build.quantizing import Line

HEADER = f"{'':<22} {'weights':>10}  {'perplexity':>10} {'change':>8}  {'divergence':>10}  {'agreement':>9}"


def quantize(
    model: Annotated[str, typer.Argument(help="local folder, hub name, or 'builtin'")] = "builtin",
    scheme: Annotated[
        Literal["int8", "int4", "w4a8"],
        typer.Option(help="int8: W8A8; int4: W4A16, w4a8: W4A8, in groups of 128"),
    ] = "int4",
    method: Annotated[
        Literal["rtn", "gptq", "awq"],
        typer.Option(help="round to nearest, make up for errors, or scale by activations"),
    ] = "gptq",
    calibrate: Annotated[
        Path | None, typer.Option(help="text to calibrate on and measure by; else the model writes one")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="folder to write the model to")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="measure every scheme and method, one after another")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="write also what is past the bounds of quality")
    ] = False,
    seed: Annotated[int, typer.Option(help="of the text that the model writes")] = 0,
) -> None:
    """Write a model in fewer bits, as compressed-tensors, or report what fewer bits cost.

    A model is not written if its perplexity grows by more than 5 %, or it diverges from the plain one by more than
    0.1 nats a token: on a fifth of the text, which the calibration has not seen. Nor is it if that fifth is less than
    1,000 tokens.
    """
    from headrace.build.quantizing import Quantizing, check_output
    from headrace.build.quantizing import quantize as write

    if output is None and not report:
        raise ConfigError("say --output FOLDER, or --report, or both")
    if output is not None:
        check_output(output)
        # The system would end the process where it stands, and leave behind what is half written.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    job = Quantizing(model, calibrate, seed)
    origin = str(calibrate) if calibrate else "the model's own writing"
    typer.echo(f"measured on {job.scored:,} tokens of {origin}")
    typer.echo(HEADER)
    if report:
        for line in job.report():
            typer.echo(shown(line))
    if output is not None:
        write(job, scheme, method, output, force=force, show=lambda line: typer.echo(shown(line)))
        typer.echo(f"written: {output}")


def shown(line: Line) -> str:
    """One line of the table."""
    from headrace.compute.memory_plan import shown_bytes

    quality = line.quality
    bad = "  past the bounds" if quality.faults() else ""
    return (
        f"{line.name:<22} {shown_bytes(line.weight_bytes):>10}  {quality.perplexity:>10.3f} {quality.growth:>+8.2%}"
        f"  {quality.divergence:>10.4f}  {quality.agreement:>9.1%}{bad}"
    )
