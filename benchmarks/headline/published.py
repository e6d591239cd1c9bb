"""Figures that other scripts measured on quiet machines, read from their cells in `docs/data/results.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.headline.record import Figure

ROOT = Path(__file__).resolve().parents[2]
PACKED = (
    "these static batches are not padded and free the rows of ended outputs, and on a CPU a row costs arithmetic: a "
    "step of few rows is much cheaper than a full one, so half-empty batches waste little"
)
DENSE = "CLINC150, at most 2 % of the hits wrong; a set of many questions of each intent, unlike the load of a server"
OTHER = "another engine, whose steps are slower too"
CERTIFIED = (
    "only 15 % of this load was asked in other words, the cache serves nothing below 300 entries, and never an answer "
    "that was cut at its length"
)
SHARED = "CPU, two shared cores"
DRAFTING = "the draft model's passes take a part of what it saves"


def published(given: object) -> tuple[list[Figure], list[dict[str, Any]]]:
    """The figures of the CPUs that the results page describes."""
    results = json.loads((ROOT / "docs" / "data" / "results.json").read_text(encoding="utf-8"))
    found = {table["id"]: table["rows"] for section in results["sections"] for table in section["tables"]}
    static, levels, drafts = found["batching-baselines"], found["cache-levels"], found["drafts-text"]
    similar, requests = levels[4], levels[2][7]
    figures = [
        Figure("static", static[0][2], "CPU, Zen 5", f"{static[0][0]}, {static[0][1]} requests: {OTHER}"),
        *(
            Figure("static", row[2], "CPU, Zen 5", f"{row[0]}, {row[1]:,} requests", PACKED)
            for row in static[1:]
        ),
        Figure("semantic", found["semantic-lookup"][0][2], "CPU, Zen 5", "over HTTP, 100,000 entries"),
        Figure("hits", found["semantic"][4][2], "any", DENSE),
        Figure("hits", 100.0 * similar[5] / requests, SHARED, "a mixed load", CERTIFIED),
        Figure(
            "prompt",
            100.0 * (1.0 - levels[1][1] / levels[0][1]),
            SHARED,
            "all computed tokens of a mixed load, outputs too, system prompt of 220 tokens",
        ),
        *(
            Figure("drafts", row[3], "CPU, Zen 4", f"{row[0]}, drafts by {row[1]}", DRAFTING)
            for row in drafts
            if row[2] == 1
        ),
    ]
    return figures, []


PARTS = (published,)
