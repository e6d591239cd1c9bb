"""One chart of several races: the speed of each contender relative to Headrace, one group of bars per race."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.figures import FIGURES
from headrace.plots import load_pyplot

COLORS = {
    "headrace": "#4e79a7",
    "openvino": "#f28e2b",
    "llama.cpp": "#59a14f",
    "transformers": "#b07aa1",
    "transformers-static": "#9c755f",
}

BAR_INCHES = 0.22


class Bar(NamedTuple):
    """A contender's medians over a race's rounds: ``speed`` as the workload counts it, ``ratio`` to Headrace's."""

    name: str
    speed: float
    ratio: float


class Drawn(NamedTuple):
    """A race as it is drawn."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


def read(path: Path) -> Drawn:
    """What `race.run` wrote. A contender without a figure, since requests of it failed, has no bar.

    Raises:
        ValueError: the file is no race's, or Headrace did not take part first.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    try:
        settings, load = document["settings"], document["settings"]["workload"]
        figure = FIGURES[load["name"]][0].title
        told = [
            Bar(each["name"], each["values"][figure], each["ratios"][figure])
            for each in document["standings"]
        ]
        bars = [bar for bar in told if None not in bar]
        title = f"{settings['model']}, {settings['precision']}, {load['name']}"
    except (KeyError, TypeError) as wrong:
        raise ValueError(f"{path} is no race's result: {wrong!r}") from None
    if not bars or bars[0].name != "headrace":
        raise ValueError(f"{path}: Headrace is not the first of {[bar.name for bar in bars]}")
    at = "" if load["name"] == "prefill" else f" {load['concurrency']}"
    return Drawn(title + at, figure, tuple(bars))


def draw(races: Sequence[Drawn], output: Path) -> None:
    """Writes an SVG, or what the suffix of ``output`` says.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    lines = sum(len(race.bars) + 1 for race in races)
    figure, axis = pyplot.subplots(figsize=(9, 1 + BAR_INCHES * lines), layout="constrained")
    at, ticks = 0.0, []
    for race in races:
        ticks.append(at + (len(race.bars) - 1) / 2)
        for bar in race.bars:
            axis.barh(at, bar.ratio, height=0.9, color=COLORS[bar.name])
            axis.text(bar.ratio + 0.01, at, f"{bar.speed:,.0f} {race.unit}", va="center", fontsize=8)
            at += 1
        at += 1
    axis.set_yticks(ticks, [race.title for race in races])
    axis.set_ylim(at - 1, -1)
    axis.set_xlim(0, 1.25 * max(bar.ratio for race in races for bar in race.bars))
    axis.axvline(1, color="#24292f", linewidth=0.8, linestyle=":")
    axis.set_xlabel("speed beside Headrace's")
    axis.spines[["top", "right"]].set_visible(False)
    present = dict.fromkeys(bar.name for race in races for bar in race.bars)
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in present]
    figure.legend(patches, list(present), loc="outside upper center", ncols=len(present), frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, small and in the reader's own font; the same races give the same file.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "races"}):
        figure.savefig(output, metadata={"Date": None})
    pyplot.close(figure)
