"""The record of the figures: tables as `scripts/results.py` renders them, and the claims of the field beside ours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "headline.json"
COLUMNS = (
    *("claim", "claimed, lowest", "claimed, highest", "figure", "unit", "machine"),
    *("how", "why it is worse than the claim"),
)


class Claim(NamedTuple):
    """A figure that descriptions of such systems name. ``least`` to ``most`` is what they claim; with ``small``, a
    smaller figure is better."""

    text: str
    least: float
    most: float
    unit: str
    small: bool = False


CLAIMS = {
    "static": Claim("continuous over static batching, output rate", 5, 23, "ratio"),
    "waste": Claim("KV memory wasted with reservation for the longest request", 60, 80, "%"),
    "paged": Claim("KV memory wasted with paged blocks", 0, 4, "%", small=True),
    "concurrent": Claim("requests at once in the same memory, paged over reserved", 2, 4, "ratio"),
    "ttft": Claim("TTFT saved by a prefix hit", 80, 80, "%"),
    "prompt": Claim("prompt tokens saved by prefix hits", 60, 80, "%"),
    "exact": Claim("response from the exact cache", 1, 5, "ms", small=True),
    "semantic": Claim("response from the semantic cache", 10, 50, "ms", small=True),
    "hits": Claim("share of requests that similar requests add to the hits", 10, 20, "%"),
    "drafts": Claim("speculative decoding, one request at a time", 2, 3, "ratio"),
    "int8": Claim("8-bit weights, decoding speed", 1.8, 1.8, "ratio"),
    "int4": Claim("4-bit weights, decoding speed", 2.5, 3, "ratio"),
    "mfu": Claim("MFU of a saturated server", 40, 55, "%"),
    "batch32": Claim("decode step of 32 requests over that of one", 1.2, 1.2, "ratio", small=True),
    "padding": Claim("computed tokens that are padding", 0, 0, "%", small=True),
    "peak": Claim("device time saved in the peak by warming", 50, 70, "%"),
    "together": Claim("everything together, device time per request", 10, 100, "ratio"),
}


class Figure(NamedTuple):
    """One measured figure: its key in `CLAIMS`, where and how it was measured, and what limits it."""

    claim: str
    value: float
    place: str
    how: str
    limit: str = ""


def short(value: float) -> float | int:
    """Three significant digits."""
    if value == 0 or not math.isfinite(value):
        return 0
    rounded = round(value, 2 - math.floor(math.log10(abs(value))))
    return int(rounded) if rounded == int(rounded) else rounded


def row(figure: Figure) -> list[Any]:
    """The row of a figure beside its claim, with its reason if it is worse."""
    claim = CLAIMS[figure.claim]
    value = short(figure.value)
    worse = value > claim.most if claim.small else value < claim.least
    reason = figure.limit if worse else ""
    return [claim.text, claim.least, claim.most, value, claim.unit, figure.place, figure.how, reason]


class Found(NamedTuple):
    """What a part has measured: the values of its figures in the order of the record, and the rows of its tables."""

    values: Sequence[float]
    rows: Mapping[str, Sequence[Sequence[Any]]]


def recorded(part: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """The part of the record with other numbers, which are shortened; its words stay."""
    figures = [each | {"value": value} for each, value in zip(part["figures"], found.values, strict=True)]
    tables = [
        each
        | {"rows": [[short(c) if isinstance(c, float) else c for c in row] for row in found.rows[each["id"]]]}
        for each in part["tables"]
    ]
    return {**part, "figures": figures, "tables": tables}


def claims(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The table of all claims, in the order of `CLAIMS`."""
    order = {name: at for at, name in enumerate(CLAIMS)}
    figures = [Figure(**each) for part in parts.values() for each in part["figures"]]
    rows = [row(each) for each in sorted(figures, key=lambda each: order[each.claim])]
    caption = (
        "Claims and figures. The simulated H200 gives predictions. Its runs and those on two cores are in the next "
        "table; all other rows repeat cells of the sections below."
    )
    return {"id": "headline", "caption": caption, "columns": list(COLUMNS), "rows": rows}


def read(path: Path) -> dict[str, Any]:
    """The parts that were recorded so far."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return found


def write(path: Path, parts: Mapping[str, Any]) -> None:
    """Write the record: the table of claims, and all parts with their tables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"claims": claims(parts), "parts": parts}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
