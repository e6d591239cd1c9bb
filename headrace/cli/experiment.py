"""``headrace experiment``: starts, shows and stops experiments on the settings of a running server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.connection import DEFAULT_URL, asked, call
from headrace.cli.help import CONTEXT, Command, Group
from headrace.config import ConfigError, read_mapping

PATH = "/v1/experiments"

experiment_app = typer.Typer(
    cls=Group,
    help="Compare two values of a setting on the traffic of a running server.",
    no_args_is_help=True,
    context_settings=CONTEXT,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option(help="Address of the server.")]
Key = Annotated[str | None, typer.Option(help="Admin key of the server (default: none).")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the experiment.")]


@experiment_app.callback()
def experiment() -> None:
    """Compare two values of a setting on the traffic of a running server."""


@experiment_app.command(cls=Command, context_settings=CONTEXT)
def start(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="YAML or JSON file: setting, treatment, metric, guards, times."),
    ],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Start an experiment. The setting changes in pairs of time windows, and returns at the end.

    To see first how long it takes and what it finds, run the same file through headrace simulate --experiment.
    """
    body = read_experiment(file)
    _show(url, api_key, lambda client: call(client, "POST", PATH, body))


@experiment_app.command(cls=Command, context_settings=CONTEXT)
def show(experiment_id: Id, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Show one experiment: effect, interval, guards and decision."""
    _show(url, api_key, lambda client: call(client, "GET", f"{PATH}/{experiment_id}"))


@experiment_app.command(cls=Command, context_settings=CONTEXT)
def power(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON file of the experiment.")],
    like: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Take noise and rate from this experiment of the server (default: none)."
        ),
    ] = None,
    deviation: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Standard deviation of a pair, or of a unit, as a share (default: that of --like)."
        ),
    ] = None,
    units_per_second: Annotated[
        float | None,
        typer.Option(min=0.0, help="Units that end in a second; not for pairs (default: that of --like)."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Print the smallest change that the experiment can detect, and the time it takes, before it is started.

    A change is found with a probability of 80 %. The noise is that of an earlier experiment or of headrace simulate.
    """
    from headrace.tuning.spec import read_plan, to_json

    spec = read_plan(read_experiment(file))
    if like is not None:
        seen = asked(url, api_key, lambda client: call(client, "GET", f"{PATH}/{like}"))
        deviation = seen["detectable"].get("deviation") if deviation is None else deviation
        if units_per_second is None:
            units_per_second = seen["detectable"].get("units_per_second")
    if deviation is None:
        raise ConfigError(
            "--deviation or --like is required: the noise determines what an experiment can detect"
        )
    print("\n".join(_forecast(to_json(spec, deviation, units_per_second), spec.unit)))


def _forecast(forecast: dict[str, Any], unit: str) -> list[str]:
    """The detectable changes as a table."""
    counted = "pairs" if unit == "time" else f"{unit}s"
    lines = [f"{'change':<10}{counted:<12}hours"]
    for each in forecast["changes"]:
        hours = "" if each["seconds"] is None else f"{each['seconds'] / 3600:.2g}"
        lines.append(
            f"{each['change']:<10.0%}{'never' if each['needed'] is None else each['needed']:<12}{hours}"
        )
    if forecast["smallest_change"] is not None:
        lines.append(
            f"smallest change by max_seconds ({forecast['most']} {counted}): {forecast['smallest_change']:.1%}"
        )
    return lines


@experiment_app.command(cls=Command, context_settings=CONTEXT)
def stop(experiment_id: Id, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Stop an experiment; its setting returns to the control value."""
    _show(url, api_key, lambda client: call(client, "DELETE", f"{PATH}/{experiment_id}"))


@experiment_app.command("list", cls=Command, context_settings=CONTEXT)
def list_all(url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """List all experiments, and the settings that may change."""

    def lines(client: Any) -> list[str]:
        found = call(client, "GET", PATH)
        shown = [line for each in found["data"] for line in describe(each)]
        settings = [
            f"{name:<30}{_value(each['value']):<12}{_bounds(each):<22}by {', '.join(each['units'])}"
            for name, each in found["settings"].items()
        ]
        return [*(shown or ["no experiments"]), "", "settings that may change:", *settings]

    print("\n".join(asked(url, api_key, lines)))


def read_experiment(file: Path) -> dict[str, Any]:
    """The experiment in a YAML or JSON file; the server checks its fields.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has a field twice.
    """
    if not (body := read_mapping(file, str(file))):
        raise ConfigError(f"{file}: expected fields such as setting, treatment and metric")
    return body


def describe(report: dict[str, Any]) -> list[str]:
    """An experiment in a few lines."""
    values = f"{_value(report['control'])} -> {_value(report['treatment'])}"
    lines = [
        f"{report['id']}  {report['setting']} {values}: {report['status']}",
        f"  {report['why'] or 'running'}",
        f"  {_progress(report)}",
        f"  {report['metric']:<28}{_effect(report['effect'])}",
    ]
    lines += [f"  guard {name:<22}{_effect(each)}" for name, each in report["guard_effects"].items()]
    smallest = report["detectable"]["smallest_change"]
    if smallest is not None:
        lines.append(f"  smallest detectable change: {smallest:.1%}")
    return lines


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _bounds(setting: dict[str, Any]) -> str:
    if "choices" in setting:
        return ", ".join(setting["choices"])
    return f"{setting['low']:g} to {setting['high']:g}"


def _progress(report: dict[str, Any]) -> str:
    """The number of measured pairs or units."""
    if report["design"] == "switchback":
        return f"pairs       {report['pairs']} of at most {report['detectable']['most_pairs']}"
    units = report["units"]
    return f"{report['unit'] + 's':<12}{units['control']} control, {units['treatment']} treatment"


def _effect(effect: dict[str, Any]) -> str:
    if effect["change"] is None:
        return "not measured yet"
    bounds = effect["interval"]
    interval = "" if bounds is None else f"  ({bounds[0]:+.1%} to {bounds[1]:+.1%})"
    return f"{effect['change']:+.1%}{interval}"


def _show(url: str, api_key: str | None, ask: Callable[[Any], dict[str, Any]]) -> None:
    print("\n".join(asked(url, api_key, lambda client: describe(ask(client)))))
