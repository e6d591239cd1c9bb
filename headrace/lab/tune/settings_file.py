"""The file of recommended settings: YAML for ``headrace serve --config``, with the reasons as comments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.lab.tune.goal import Goal
from headrace.lab.tune.judge import Verdict
from headrace.lab.tune.space import Settings


def reasons(goal: Goal, verdict: Verdict | None) -> list[str]:
    """Why these settings are recommended, or why the present ones are kept, as lines."""
    if verdict is None:
        return ["No setting was better than the present ones in the simulation; these are the present ones."]
    lines = [
        f"{goal.name}: {goal.shown(verdict.present)} with the present settings, "
        f"{goal.shown(verdict.candidate)} with the best ones found.",
        f"Gain: {goal.shown_gain(verdict.gain)} (95 % interval {goal.shown_gain(verdict.interval.low)} to "
        f"{goal.shown_gain(verdict.interval.high)}, {verdict.pairs} pairs).",
    ]
    if not verdict.better:
        lines.append("This is within the noise, so nothing is recommended; these are the present settings.")
    return lines


def settings_text(
    settings: Settings, present: Settings, comments: Sequence[str], fixed: Mapping[str, str]
) -> str:
    """The file's text. ``fixed`` are given options that were not searched."""
    lines = [f"# {each}" for each in comments]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fixed.items()]
    for name, value in settings.items():
        was = f"was {present[name]:g}" if value != present[name] else "unchanged"
        lines.append(f"{name.replace('_', '-') + f': {value:g}':34} # {was}")
    return "\n".join(lines) + "\n"
