"""``headrace experiment``: starts, shows and stops experiments on the settings of a running server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.connection import DEFAULT_URL, ServerError, call, open_client
from headrace.cli.help import CONTEXT, Command, Group
from headrace.config import ConfigError

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
            f"{name:<30}{each['value']:<12g}{each['low']:g} to {each['high']:g}"
            for name, each in found["settings"].items()
        ]
        return [*(shown or ["no experiments"]), "", "settings that may change:", *settings]

    print("\n".join(_asked(url, api_key, lines)))


def read_experiment(file: Path) -> dict[str, Any]:
    """The experiment in a YAML or JSON file; the server checks its fields.

    Raises:
        ConfigError: the file cannot be read, or is no mapping.
    """
    import yaml

    try:
        body = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{file}: expected fields such as setting, treatment and metric")
    return body


def describe(report: dict[str, Any]) -> list[str]:
    """An experiment in a few lines."""
    control, treatment = report["control"], report["treatment"]
    lines = [
        f"{report['id']}  {report['setting']} {control:g} -> {treatment:g}: {report['status']}",
        f"  {report['why'] or 'running'}",
        f"  pairs       {report['pairs']} of at most {report['detectable']['most_pairs']}",
        f"  {report['metric']:<28}{_effect(report['effect'])}",
    ]
    lines += [f"  guard {name:<22}{_effect(each)}" for name, each in report["guard_effects"].items()]
    smallest = report["detectable"]["smallest_change"]
    if smallest is not None:
        lines.append(f"  smallest change that all pairs would show: {smallest:.1%}")
    return lines


def _effect(effect: dict[str, Any]) -> str:
    if effect["change"] is None:
        return "not measured yet"
    bounds = effect["interval"]
    interval = "" if bounds is None else f"  ({bounds[0]:+.1%} to {bounds[1]:+.1%})"
    return f"{effect['change']:+.1%}{interval}"


def _show(url: str, api_key: str | None, ask: Callable[[Any], dict[str, Any]]) -> None:
    print("\n".join(_asked(url, api_key, lambda client: describe(ask(client)))))


def _asked(url: str, api_key: str | None, ask: Callable[[Any], list[str]]) -> list[str]:
    try:
        with open_client(url, api_key) as client:
            return ask(client)
    except ServerError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
