"""``headrace cache estimate``: what each cache would save on a file of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.observe.cost.prices import Pricing
    from headrace.response_cache.estimate import Work
    from headrace.wiring.estimate import Estimated

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
