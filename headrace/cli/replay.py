"""``headrace replay``: replays a recorded scheduler trace, step by step or with other settings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.config import ConfigError
from headrace.files import replace_text

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.lab.replay.exact import Replay, Scene
    from headrace.lab.replay.trace import Trace

LONGEST_PAUSE_SECONDS = 1.0
"""``--follow`` keeps the recorded pace, but waits at most this long for the next step."""

First = Annotated[
    int | None, typer.Option("--from", min=0, help="First step to show (default: none are shown).")
]
Last = Annotated[int | None, typer.Option("--to", min=0, help="Last step to show (default: the last one).")]


Perfetto = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        metavar="FILE",
        help="Write steps and requests as a trace for https://ui.perfetto.dev or chrome://tracing.",
    ),
]
Steps = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        metavar="FILE",
        help="Write the steps as JSON for the server's step-by-step page.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(help="Replay with another scheduling policy and compare: fair, fcfs, priority or static."),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Replay with another value of an option and compare. Repeatable."
    ),
]


def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace file written by headrace serve --record-trace.")
    ],
    first: First = None,
    last: Last = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Show all events of one request.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show the steps at their recorded pace.")] = False,
    perfetto: Perfetto = None,
    steps: Steps = None,
    policy: Policy = None,
    change: Change = None,
) -> None:
    """Replay a recorded scheduler trace: check that every decision is the same, show or export steps, or compare other
    settings.

    Without options it verifies that the engine makes the same decisions as when it was recorded.
    """
    from rich.console import Console

    from headrace.lab.replay.trace import BadTrace, read_trace

    try:
        recording = read_trace(trace)
    except OSError as error:
        raise ConfigError(f"{trace} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except BadTrace as error:
        raise ConfigError(str(error)) from None
    console = Console(highlight=False, soft_wrap=True)
    console.print(*_describe(recording), sep="\n", markup=False)
    changes = _changes(policy, change or [])
    shows = (first, last, request) != (None, None, None) or follow
    if changes and shows:
        raise ConfigError(
            "--policy and --set compare whole runs; --from, --to, --request and --follow show the recorded one"
        )
    if perfetto or steps:
        if changes or request or follow:
            raise ConfigError(
                "--perfetto and --steps export the recorded run; of the other options they take --from and --to"
            )
        agrees = _export(console, recording, first or 0, last, perfetto, steps)
        raise typer.Exit(not agrees)
    agrees = (
        _compare(console, recording, changes)
        if changes
        else _show(console, recording, first, last, request, follow=follow, quiet=not shows)
    )
    if not agrees:
        raise typer.Exit(1)


def _describe(recording: Trace) -> list[str]:
    from headrace.lab.replay.trace import Step
    from headrace.observe.trace_file import Adopted, Submitted

    steps = recording.of(Step)
    seconds = steps[-1].now - steps[0].now if steps else 0.0
    lines = [
        f"trace     {recording.path}: Headrace {recording.version}",
        f"recorded  {len(steps):,} steps in {seconds:.2f} s, {len(recording.of(Submitted)):,} requests",
    ]
    if adopted := recording.of(Adopted):
        blocks = adopted[0].blocks
        lines.append(
            f"note      the run began with {blocks:,} blocks of an earlier run, which the trace does not contain"
        )
    return lines + ([f"cut       {recording.cut}"] if recording.cut else [])


def _changes(policy: str | None, given: list[str]) -> dict[str, str]:
    changes = {} if policy is None else {"scheduling_policy": policy}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {text}: expected NAME=VALUE, for example --set max-num-seqs=8")
        changes[name] = value
    return changes


def _show(
    console: Console,
    recording: Trace,
    first: int | None,
    last: int | None,
    request: str | None,
    *,
    follow: bool,
    quiet: bool,
) -> bool:
    from headrace.lab.replay.exact import Replay
    from headrace.lab.replay.show import Timeline, scene_panel
    from headrace.wiring.recording import make_engine_again

    replayed = Replay(recording, make_engine_again)
    timeline = None if request is None else Timeline(request)
    start: float | None = None
    scene: Scene | None = None
    shown: Scene | None = None
    for scene in replayed.scenes():
        start = scene.now if start is None else start
        if (first is not None and scene.step < first) or (last is not None and scene.step > last):
            continue
        if timeline is not None:
            timeline.add(scene)
        elif not quiet:
            if follow and shown is not None:
                time.sleep(min(LONGEST_PAUSE_SECONDS, max(0.0, scene.now - shown.now)))
            console.print(scene_panel(scene, start))
            shown = scene
    if timeline is not None:
        if (table := timeline.table()) is None:
            raise ConfigError(f"--request {request}: the steps shown have no event of this request")
        console.print(table)
    telling = scene is not None and (scene.waiting or scene.recorded_error or replayed.divergence is not None)
    if scene is not None and start is not None and telling and shown is not scene and timeline is None:
        console.print(scene_panel(scene, start))
    return _verdict(console, replayed, scene)


def _export(
    console: Console,
    recording: Trace,
    first: int,
    last: int | None,
    perfetto: Path | None,
    steps: Path | None,
) -> bool:
    """Write the files; returns whether the replay agrees with the recording."""
    import json

    from headrace.lab.replay.show import divergence_text
    from headrace.wiring.recording import make_engine_again
    from headrace.wiring.step_documents import RecordedSteps, recorded_steps, recorded_trace

    found = RecordedSteps(recording, make_engine_again, first, last)
    if found.divergence is not None:
        console.print(*divergence_text(found.divergence), sep="\n", markup=False)
        return False
    if not found.records:
        raise ConfigError("the trace has no such steps")
    cut = ", the first of them; choose others with --from and --to" if found.cut else ""
    for file, make in ((perfetto, recorded_trace), (steps, recorded_steps)):
        if file is None:
            continue
        try:
            replace_text(file, json.dumps(make(found)))
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {(error.strerror or str(error)).lower()}") from None
        console.print(f"written   {file}: {len(found.records):,} steps{cut}")
    return True


def _verdict(console: Console, replayed: Replay, scene: Scene | None) -> bool:
    from headrace.lab.replay.show import divergence_text

    if replayed.divergence is not None:
        console.print(*divergence_text(replayed.divergence), sep="\n", markup=False)
        return False
    if scene is not None and scene.recorded_error:
        again = "occurred again" if scene.error == scene.recorded_error else "did not occur again"
        console.print(f"replay    all events are as recorded; the error that ended the engine {again}")
        return True
    console.print("replay    all events are as recorded")
    return True


def _compare(console: Console, recording: Trace, changes: Mapping[str, str]) -> bool:
    from headrace.lab.replay.rerun import recorded, rerun
    from headrace.lab.replay.show import comparison, divergence_text
    from headrace.wiring.recording import make_engine_again

    baseline = recorded(recording, make_engine_again)
    if baseline.divergence is not None:
        console.print(*divergence_text(baseline.divergence), sep="\n", markup=False)
        return False
    runs = {
        "as recorded": baseline.tally,
        "simulated, unchanged": rerun(recording, make_engine_again, baseline.times, baseline.drafting),
        "simulated, " + ", ".join(f"{name}={value}" for name, value in changes.items()): rerun(
            recording, partial(make_engine_again, changes=changes), baseline.times, baseline.drafting
        ),
    }
    console.print(comparison(runs))
    console.print(
        f"predicted step times differ from recorded ones by {100 * baseline.times.spread:.0f} % on average"
    )
    return True
