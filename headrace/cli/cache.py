"""``headrace cache``: calibration of the semantic cache, and an estimate of what all caches would save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.connection import DEFAULT_URL, asked, call_raw
from headrace.cli.help import CONTEXT, Command, Group
from headrace.cli.machines import PlaceFlags, placed_machine
from headrace.cli.options import with_options
from headrace.cli.output import Meter, progress, show, write, written
from headrace.config import (
    CacheOptions,
    ConfigError,
    CostOptions,
    ModelOptions,
    Options,
    ResponseCacheOptions,
    SemanticOptions,
    options,
)
from headrace.files import replace_text

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.observe.cost.prices import Pricing
    from headrace.response_cache.estimate import Work
    from headrace.response_cache.rules.calibration import Calibration
    from headrace.wiring.estimate import Estimated

# ``headrace cache estimate``: what each cache would save on a file of requests.

FLAGS = (
    *("max_model_len", "block_size", "response_cache_ttl"),
    *("semantic_calibration", "semantic_max_error", "semantic_encoder", "semantic_judge"),
    *("device_price", "price_per_million_prompt_tokens", "price_per_million_cached_tokens"),
    *("price_per_million_output_tokens", "currency"),
)
"""The options that have a flag here; ``--config`` may set all."""

SHOWN_PROBLEMS = 5

NAMES = {
    "exact": "exact",
    "coalesced": "coalesced",
    "semantic": "semantic",
    "prefix": "prefix, of the rest",
}
"""The levels by their layer."""

NEAR = "near duplicates"


@dataclass(frozen=True)
class LogFlags:
    """What the file is, and what it does not say."""

    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Requests: JSON lines of OpenAI bodies or of a batch file, or the --history-file of a server with "
            "--record-history.",
            show_default=False,
        ),
    ]
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model whose tokenizer, chat template and defaults apply: a folder, GGUF file or Hugging Face name "
            "(default: as headrace serve). No weights are loaded.",
        ),
    ] = None
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Tenant of all requests, as if one API key had sent them (default: each line's tenant, or else its "
            "field user)."
        ),
    ] = None
    output_len: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Output tokens of a request whose line does not give them (default: the mean that the scheduler "
            "expects for its max_tokens).",
        ),
    ] = None
    concurrency: Annotated[
        int, typer.Option(min=1, help="Sequences that a device decodes together, for device seconds.")
    ] = 16
    min_similarity: Annotated[
        float,
        typer.Option(min=0, max=1, help="Least cosine of a near duplicate, without --semantic-calibration."),
    ] = 0.8
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, writable=True, metavar="FILE", help="JSON of the result (default: none)."
        ),
    ] = None


@with_options(ModelOptions, CacheOptions, ResponseCacheOptions, SemanticOptions, CostOptions, only=FLAGS)
def estimate(given: Options, log: LogFlags, place: PlaceFlags) -> None:
    """Estimate what each cache would save on your own requests, without computing them.

    The requests are rendered, tokenized and looked up by the server's rules, in the order of the file. A line that
    cannot be used is reported with its number and left out. The command fails if no line can be used.
    """
    from headrace.wiring.engine import make_pricing
    from headrace.wiring.estimate import Assumed
    from headrace.wiring.estimate import estimate as run

    if log.model is not None:
        given = options({**given.source.given, "model": log.model}, given.source.file)
    pricing = make_pricing(given.cost)
    if pricing.device_second and not place.simulated and not pricing.by_token:
        raise ConfigError("--device-price needs a machine: --simulated-device or --calibration")
    if log.output is not None and log.output.absolute() == log.file.absolute():
        raise ConfigError("--output: the file of the requests would be overwritten")
    machine = placed_machine(place, given) if place.simulated else None
    assumed = Assumed(log.tenant, log.output_len, log.concurrency, log.min_similarity)
    with progress(f"reading {log.file}") as meter:
        found = run(log.file, given, machine, assumed, _counter(meter))
    name = "" if machine is None else machine.name
    show(*_lines(found), table(found, pricing, timed=machine is not None), *notes(found, given, name))
    if log.output is not None:
        write(log.output, document(found, pricing, given, name))
        written(log.output)


def _counter(meter: Meter) -> Callable[[int], None]:
    """Shows the number of the line that is read."""

    def read(number: int) -> None:
        meter.text = f"line {number}"

    return read


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _lines(found: Estimated) -> list[str]:
    """What was read, and what was left out."""
    tally, total = found.tally, found.tally.total
    sequences = "" if total.requests == found.requests else f" ({total.requests:,} sequences)"
    lines = [
        f"requests     {found.requests:,}{sequences} of {len(tally.tenants):,} tenants, "
        f"{total.prompt_tokens:,} prompt tokens, {total.output_tokens:,.0f} output tokens"
    ]
    for why, bypassed in sorted(tally.bypassed.items()):
        lines.append(
            f"not cached   {bypassed.requests:,} ({why}), {bypassed.repeats:,} of them equal to an earlier one but for "
            "the seed"
        )
    if found.left_out:
        lines.append(f"left out     {found.left_out:,} lines")
        lines += [f"             {each.message}" for each in found.problems[:SHOWN_PROBLEMS]]
    return lines


def rows(found: Estimated) -> list[tuple[str, Work]]:
    """The levels that are estimated, all together, and what does not add to them."""
    from headrace.core.events import Layer

    tally = found.tally
    shown = [
        (NAMES[layer.value], work)
        for layer, work in tally.saved.items()
        if not (layer is Layer.SEMANTIC and not found.near.certified)
        and not (layer is Layer.COALESCED and not tally.separable and not work.requests)
    ]
    shown += [("together", tally.together()), ("prefix alone", tally.prefix_alone)]
    return shown if found.near.missing or found.near.certified else [*shown, (NEAR, tally.near)]


def cost(work: Work, pricing: Pricing, *, prefix: bool) -> float:
    """What computing it would have cost; by the token if tokens have a price, as in a server."""
    if not pricing.by_token:
        return work.device_seconds * pricing.device_second
    if prefix:
        return pricing.tokens.saved_by_prefix(work.prompt_tokens)
    return pricing.tokens.saved(work.prompt_tokens, round(work.output_tokens))


def costs(found: Estimated, pricing: Pricing) -> dict[str, float]:
    """The saved cost of each row."""
    by_name = {name: cost(work, pricing, prefix=name.startswith("prefix")) for name, work in rows(found)}
    by_name["together"] = sum(by_name[name] for name in NAMES.values() if name in by_name)
    return by_name


def table(found: Estimated, pricing: Pricing, *, timed: bool) -> Table:
    """One row per level, each after those above it."""
    from rich.table import Table

    total = found.tally.total
    made = Table(title="saved by each level, after those above it", title_justify="left", box=None)
    columns = ["level", "requests", "share", "prompt tokens", "share", "output tokens", "share"]
    columns += ["device s", "share"] if timed else []
    columns += [pricing.currency] if pricing.given else []
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if number else "left")
    saved = costs(found, pricing)
    for name, work in rows(found):
        cells = [name, f"{work.requests:,}", _share(work.requests, total.requests)]
        cells += [f"{work.prompt_tokens:,}", _share(work.prompt_tokens, total.prompt_tokens)]
        cells += [f"{work.output_tokens:,.0f}", _share(work.output_tokens, total.output_tokens)]
        if timed:
            cells += [f"{work.device_seconds:,.2f}", _share(work.device_seconds, total.device_seconds)]
        made.add_row(*cells, *([f"{saved[name]:,.4f}"] if pricing.given else []))
    return made


def notes(found: Estimated, given: Options, machine: str) -> list[str]:
    """What the figures rest on, and what the estimate cannot know."""
    tally, near = found.tally, found.near
    lines = []
    if near.missing:
        lines.append(f"near duplicates are not estimated: {near.missing}")
    elif near.certified:
        lines.append(
            f"semantic: by {given.semantic.semantic_calibration}, at most {given.semantic.semantic_max_error:g} of the "
            "served responses wrong; without the texts of responses each stored one counts as a different answer"
        )
    else:
        lines.append(
            f"{NEAR}: an upper bound that is not certified and not part of the sum: an earlier request has a cosine of "
            f"{near.least_cosine:g} or more, and no guard rejects it. Run headrace cache calibrate, and give "
            "--semantic-calibration"
        )
    if not tally.timed:
        lines.append(
            f"times of arrival are not known: no response expires (--response-cache-ttl "
            f"{given.response_cache.response_cache_ttl:g} s would lose hits that are further apart), and coalesced "
            "requests count as exact"
        )
    elif tally.separable < tally.timed:
        lines.append(
            "durations are not known for all requests: coalesced ones count as exact; name a machine, or give seconds"
        )
    if tally.disordered:
        lines.append(
            f"{tally.disordered:,} lines are earlier than one before them; sort the file by timestamp"
        )
    if found.lengths_known < found.requests:
        unknown = found.requests - found.lengths_known
        lines.append(
            f"the output length of {unknown:,} requests is assumed (output_tokens or --output-len sets it)"
        )
    if found.forgotten:
        lines.append(f"{found.forgotten:,} keys were forgotten to bound memory: far repeats are missed")
    lines.append(f"prefix: a KV cache of {found.kv_tokens:,} tokens" + (f", {machine}" if machine else ""))
    lines.append(
        "not known: whether clients would set temperature 0 or a seed, or send fewer choices (n); how traffic changes; "
        "responses that are cut off, cleared or evicted; the time of lookups"
    )
    return lines


def document(found: Estimated, pricing: Pricing, given: Options, machine: str) -> Mapping[str, Any]:
    """The result as plain values."""
    tally, total, saved = found.tally, found.tally.total, costs(found, pricing)
    return {
        "requests": found.requests,
        "sequences": total.requests,
        "tenants": len(tally.tenants),
        "prompt_tokens": total.prompt_tokens,
        "output_tokens": total.output_tokens,
        "output_lengths_known": found.lengths_known,
        "device_seconds": total.device_seconds if machine else None,
        "machine": machine or None,
        "kv_cache_tokens": found.kv_tokens,
        "times_known": tally.timed,
        "durations_known": tally.separable,
        "forgotten_keys": found.forgotten,
        "not_cached": {
            why: {"requests": each.requests, "repeats": each.repeats} for why, each in tally.bypassed.items()
        },
        "left_out": found.left_out,
        "problems": [each._asdict() for each in found.problems],
        "semantic": found.near._asdict(),
        "currency": pricing.currency if pricing.given else None,
        "saved": {
            name: {
                "requests": work.requests,
                "share": work.requests / total.requests,
                "prompt_tokens": work.prompt_tokens,
                "output_tokens": work.output_tokens,
                "device_seconds": work.device_seconds if machine else None,
                "cost": saved[name] if pricing.given else None,
            }
            for name, work in rows(found)
        },
        "notes": notes(found, given, machine),
    }


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
    from headrace.response_cache.semantic.calibrate import BadRows, read_rows
    from headrace.response_cache.semantic.calibrate import calibrate as fit

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
