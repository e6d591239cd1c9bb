"""The files under ``deploy/``, read for the tests that check them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "headrace.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
PROMETHEUS = DEPLOY / "prometheus" / "prometheus.yml"

PIP = "pip install -e '.[deploy]'"
"""How the programs and packages that check these files are installed."""

METRIC = re.compile(r"headrace:([a-z]\w+)(\{[^}]*\})?")
"""A metric in a query, with its label matchers."""


def program(name: str, package: str) -> str:
    """The path of a program. In CI its absence is a failure, elsewhere a skip."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        message = f"{name} is not installed: {package}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found


def module(name: str) -> Any:
    """A package of the extra ``deploy``. In CI its absence is a failure, elsewhere a skip."""
    if os.environ.get("CI"):
        return __import__(name)
    return pytest.importorskip(name, reason=PIP)


def run(command: list[str], folder: Path = ROOT) -> tuple[int, str]:
    """The exit status of a command, and everything that it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def version() -> str:
    """The version of the project."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard that show something."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Each query of the dashboard with the title of its panel."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml(ALERTS)["groups"] for rule in group["rules"]]
