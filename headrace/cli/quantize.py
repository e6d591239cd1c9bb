"""``headrace quantize``: writes a model in fewer bits, and measures what that costs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from headrace.cli.options import one_of
from headrace.cli.output import progress
from headrace.config import ConfigError

if TYPE_CHECKING:
    from headrace.wiring.quantizing import Line

HEADER = f"{'':<22} {'weights':>10}  {'perplexity':>10} {'change':>8}  {'divergence':>10}  {'agreement':>9}"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: a local folder, a Hugging Face name, or builtin (default: builtin).",
        show_default=False,
    ),
]
Scheme = Annotated[
    str,
    typer.Option(
        metavar="[int8|int4|w4a8]",
        help="Scheme: int8 (W8A8), int4 (W4A16) or w4a8 (W4A8), the latter two in groups of 128.",
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        metavar="[rtn|gptq|awq]",
        help="Method: round to nearest (rtn), error compensation (gptq) or activation scaling (awq).",
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text for calibration and measurement (default: text that the model generates).",
    ),
]
Output = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder to write the model to (default: none).")
]
Report = Annotated[bool, typer.Option("--report", help="Measure every scheme and method, one after another.")]
Force = Annotated[
    bool, typer.Option("--force", help="Write the model even if it exceeds the quality limits.")
]
Seed = Annotated[int, typer.Option(help="Seed of the text that the model generates.")]


def quantize(
    model: Model = "builtin",
    scheme: Scheme = "int4",
    method: MethodName = "gptq",
    calibrate: Calibrate = None,
    output: Output = None,
    report: Report = False,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """Write a model in fewer bits, in compressed-tensors format, or report what fewer bits cost.

    Quality is measured on a fifth of the text, which calibration does not use. The model is not written if its
    perplexity grows by more than 5 %, if it diverges from the original by more than 0.1 nats per token, or if
    that fifth is less than 1,000 tokens.
    """
    from headrace.compute.quantizing import Method
    from headrace.wiring.quantizing import Quantizing, check_output
    from headrace.wiring.quantizing import quantize as write

    if output is None and not report:
        raise ConfigError("give --output FOLDER, or --report, or both")
    one_of("--scheme", scheme, ("int8", "int4", "w4a8"))
    method_name = cast(Method, one_of("--method", method, get_args(Method)))
    ended: list[int] = []
    if output is not None:
        check_output(output)

        def end(number: int, frame: object) -> None:
            ended.append(128 + number)
            sys.exit(128 + number)

        # By default SIGTERM ends the process at once and leaves a half-written folder behind.
        signal.signal(signal.SIGTERM, end)
    with progress(f"preparing {model} and its text"):
        job = Quantizing(model, calibrate, seed)
    origin = str(calibrate) if calibrate else "text that the model generated"
    typer.echo(f"measured on {job.scored:,} tokens of {origin}")
    typer.echo(HEADER)
    if report:
        with progress("measuring schemes and methods", job.report_lines) as meter:
            for line in meter.count(job.report()):
                typer.echo(shown(line))
    if output is not None:
        try:
            with progress(f"writing and measuring {scheme} {method}"):
                write(
                    job, scheme, method_name, output, force=force, show=lambda line: typer.echo(shown(line))
                )
        except Exception:
            if ended:  # a library turned the SystemExit into its own error
                sys.exit(ended[0])
            raise
        typer.echo(f"written: {output}")


def shown(line: Line) -> str:
    """One line of the table."""
    from headrace.compute.memory_plan import shown_bytes

    quality = line.quality
    bad = "  exceeds the quality limits" if quality.faults() else ""
    return (
        f"{line.name:<22} {shown_bytes(line.weight_bytes):>10}  {quality.perplexity:>10.3f} {quality.growth:>+8.2%}"
        f"  {quality.divergence:>10.4f}  {quality.agreement:>9.1%}{bad}"
    )
