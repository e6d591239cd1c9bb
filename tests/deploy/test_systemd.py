"""systemd accepts the unit, rates its hardening, and the server understands the example of its options."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from headrace.config import ServerOptions, options
from tests.deploy.files import DEPLOY, program, run

UNIT = DEPLOY / "systemd" / "headrace.service"
MOST_EXPOSURE = "25"
"""2.5 of 10, as ``systemd-analyze security`` counts."""


def analyze(*command: str) -> tuple[int, str]:
    return run([program("systemd-analyze", "apt-get install --no-install-recommends systemd"), *command])


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists here, which systemd asks for."""
    text = UNIT.read_text()
    assert "/opt/headrace/bin/headrace" in text
    file = tmp_path / UNIT.name
    file.write_text(text.replace("/opt/headrace/bin/headrace", "/bin/true"))
    return file


def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert analyze("verify", "--man=no", str(unit)) == (0, "")


def test_a_misspelt_setting_is_found(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "ProtectHouse" in analyze("verify", "--man=no", str(unit))[1]


def test_the_unit_is_hardened(unit: Path) -> None:
    status, said = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", str(unit))
    assert status == 0, said


def test_the_unit_drains_and_reloads() -> None:
    parsed = configparser.RawConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment]
    parsed.read_string(UNIT.read_text())
    service = parsed["Service"]
    assert service["Type"] == "notify"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["User"] == "headrace"
    assert float(service["TimeoutStopSec"]) > ServerOptions().drain_timeout


def test_the_server_understands_the_examples(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DEPLOY / "systemd"
    lines = (folder / "headrace.yaml.example").read_text().splitlines()
    whole = [line.removeprefix("#") if line.startswith("#") and ": " in line else line for line in lines]
    file = unit.with_name("headrace.yaml")
    file.write_text("\n".join(line for line in whole if not line.startswith(" ")))
    chosen = options({}, file)
    assert chosen.server.api_key_file == "/etc/headrace/keys"
    assert chosen.cache.kv_offload_path == "/var/lib/headrace/kv"
    for line in (folder / "environment.example").read_text().splitlines():
        name, given, _ = line.removeprefix("#").partition("=")
        if given and name.startswith("HEADRACE_"):
            monkeypatch.setenv(name, "a value")
    assert options({}, file).response_cache.response_cache_secret == "a value"
