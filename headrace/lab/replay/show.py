"""Terminal output of a replay: a panel per step, a timeline per request, and a table that compares runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from headrace.core.events import (
    Admitted,
    Arrived,
    Chunked,
    Emitted,
    Event,
    Evicted,
    Finished,
    Preempted,
    Skipped,
)
from headrace.lab.bench.stats import percentile
from headrace.lab.replay.exact import Divergence, PlannedRow, Scene
from headrace.lab.replay.rerun import Tally

MOST_LINES = 16
"""Maximum number of rows, of waiting requests and of events shown for one step."""

BAR_CELLS = 30


def scene_panel(scene: Scene, start: float) -> RenderableType:
    """One step: its rows, waiting requests with reasons, blocks, and events. ``start`` is the trace's first time."""
    tokens = sum(each.row.length for each in scene.rows)
    title = (
        f"step {scene.step}   {scene.now - start:.4f} s   took {1e3 * scene.seconds:.2f} ms   {len(scene.rows)} rows,"
        f" {tokens} tokens   {scene.running} running, {len(scene.waiting)} waiting   line {scene.line}"
    )
    sides = Table.grid(padding=(0, 4))
    sides.add_row(*([_rows(scene)] if scene.rows else []), *([_waiting(scene)] if scene.waiting else []))
    parts: list[RenderableType] = [sides, _blocks(scene)]
    lines = [line for event in scene.events if (line := event_text(event))]
    parts += [escape(line) for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        parts.append(f"and {len(lines) - MOST_LINES} more events")
    if scene.recorded_error:
        parts.append(f"[bold red]raised when recorded:[/] {escape(scene.recorded_error)}")
        parts.append(
            f"[bold red]raised now:[/] {escape(scene.error or 'nothing: the cause is outside the core')}"
        )
    elif scene.error:
        parts.append(f"[bold red]raised now:[/] {escape(scene.error)}")
    return Panel(Group(*parts), title=title, title_align="left")


def _rows(scene: Scene) -> Table:
    table = Table(box=None)
    table.add_column("runs")
    table.add_column("computes")
    for each in scene.rows[:MOST_LINES]:
        table.add_row(escape(each.request_id), escape(row_text(each)))
    if len(scene.rows) > MOST_LINES:
        table.add_row(f"and {len(scene.rows) - MOST_LINES} more", "")
    return table


def _waiting(scene: Scene) -> Table:
    table = Table(box=None)
    table.add_column("waits")
    table.add_column("for", justify="right")
    table.add_column("why")
    for each in scene.waiting[:MOST_LINES]:
        table.add_row(
            escape(each.request_id), f"{scene.now - each.since:.3f} s", each.reason.replace("_", " ")
        )
    if len(scene.waiting) > MOST_LINES:
        table.add_row(f"and {len(scene.waiting) - MOST_LINES} more", "", "")
    return table


def _blocks(scene: Scene) -> str:
    cells = round(BAR_CELLS * scene.blocks_held / scene.blocks_total)
    bar = "█" * cells + "░" * (BAR_CELLS - cells)
    return f"blocks {bar} {scene.blocks_held} of {scene.blocks_total} held"


def row_text(planned: PlannedRow) -> str:
    """What a row computes: the next token, or a range of positions of the prompt or of recomputed tokens."""
    _, prompt_tokens, row = planned
    end = row.start + row.length
    if row.length == 1 and row.start >= prompt_tokens:
        return f"token {row.start - prompt_tokens + 2}"
    where = (
        f"prompt of {prompt_tokens}"
        if end <= prompt_tokens
        else f"prompt of {prompt_tokens} and recomputed output"
    )
    return f"[{row.start}, {end}) of {where}"


def event_text(event: Event) -> str:
    """An event as text; empty for events that a panel shows elsewhere."""
    match event:
        case Arrived():
            return f"{event.request_id} arrived: {event.prompt_tokens} tokens of {event.tenant}"
        case Admitted():
            cached = f", {event.cached_tokens} of {event.known_tokens} tokens cached"
            return f"{event.request_id} admitted ({event.reason}){cached}"
        case Skipped():
            return f"{event.request_id} waits: {event.reason.replace('_', ' ')}"
        case Preempted():
            return f"{event.request_id} preempted ({event.reason}): {event.lost_tokens} computed tokens lost"
        case Finished():
            more = f": {event.message}" if event.message else ""
            return f"{event.request_id} finished ({event.reason}) after {event.output_tokens} tokens{more}"
        case Evicted():
            blocks = ", ".join(map(str, event.blocks))
            return f"block{'s' * (len(event.blocks) > 1)} {blocks} evicted ({event.reason})"
    return ""


class Timeline:
    """All events of one request, one per line; consecutive tokens share a line."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._lines: list[tuple[int, float, str]] = []
        self._tokens = 0
        self._first_token: tuple[int, float, int] | None = (
            None  # step, time and number of the first of consecutive tokens
        )

    def add(self, scene: Scene) -> None:
        """Adds a step's events of this request."""
        for event in scene.events:
            if getattr(event, "request_id", None) != self._request_id:
                continue
            if isinstance(event, Emitted):
                self._first_token = self._first_token or (scene.step, scene.now, self._tokens + 1)
                self._tokens += len(event.tokens)
            else:
                self._flush_tokens()
                self._lines.append((scene.step, scene.now, _without_request(event)))

    def _flush_tokens(self) -> None:
        if self._first_token is not None:
            step, now, first = self._first_token
            text = f"token {first}" if first == self._tokens else f"tokens {first} to {self._tokens}"
            self._lines.append((step, now, text))
            self._first_token = None

    def table(self) -> Table | None:
        """The timeline, in seconds since the step of the arrival; None if the request has no events."""
        self._flush_tokens()
        if not self._lines:
            return None
        table = Table(title=f"request {escape(self._request_id)}", title_justify="left")
        for name in ("step", "seconds", "what"):
            table.add_column(name, justify="left" if name == "what" else "right")
        for step, now, text in self._lines:
            table.add_row(str(step), f"{now - self._lines[0][1]:.4f}", escape(text))
        return table


def _without_request(event: Event) -> str:
    """An event as text, without the request's id."""
    if isinstance(event, Chunked):
        end = event.start + event.length
        return f"prompt [{event.start}, {end}) planned: {event.reason.replace('_', ' ')}"
    text = event_text(event) or type(event).__name__
    return text.removeprefix(f"{getattr(event, 'request_id', '')} ")


def divergence_text(divergence: Divergence) -> list[str]:
    """The first difference between the recording and the replay, as lines."""
    return [
        f"the replay differs from line {divergence.line} on",
        f"  recorded: {divergence.recorded or 'no further event in this step'}",
        f"  now:      {divergence.replayed or 'no further event in this step'}",
    ]


def comparison(runs: Mapping[str, Tally]) -> Table:
    """Runs side by side; the first one is the baseline."""
    table = Table(header_style="bold")
    table.add_column("")
    for name in runs:
        table.add_column(escape(name), justify="right")
    tallies = list(runs.values())
    for label, cells in comparison_rows(tallies):
        table.add_row(label, *cells)
    return table


def comparison_rows(tallies: Sequence[Tally]) -> list[tuple[str, list[str]]]:
    """The rows of `comparison` as text."""
    rows = [("completed requests", [str(len(tally.e2e)) for tally in tallies])]
    for label, name in (("TTFT", "ttft"), ("wait", "waits"), ("end to end", "e2e")):
        spreads: list[list[float]] = [getattr(tally, name) for tally in tallies]
        rows.append((f"{label} s p50 / p95 / p99", [_spread(values) for values in spreads]))
    rows += [
        ("preemptions", [str(tally.preemptions) for tally in tallies]),
        ("computed tokens lost to preemption", [str(tally.lost_tokens) for tally in tallies]),
        ("cached tokens", [str(tally.cached_tokens) for tally in tallies]),
        ("steps", [str(tally.steps) for tally in tallies]),
        ("busy s", [f"{tally.busy_seconds:.2f}" for tally in tallies]),
    ]
    return rows


def _spread(values: list[float]) -> str:
    figures = [percentile(values, percent) for percent in (50.0, 95.0, 99.0)]
    return " / ".join("-" if math.isnan(figure) else f"{figure:.3f}" for figure in figures)
