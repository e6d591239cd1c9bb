from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import options
from headrace.wiring.reload import Reload, Settings, read_settings
from headrace.wiring.tenants import read_tenants


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("log-level: info\nport: 1\n")
    return path


def test_the_log_level_and_the_tenants_file_are_read_again(file: Path, caplog) -> None:
    started = options({}, file)
    file.write_text("log-level: debug\nport: 1\ntenants: t.yaml\n")
    assert read_settings(started) == ("t.yaml", "debug")
    assert not caplog.records


def test_other_options_that_changed_are_named(file: Path, caplog) -> None:
    started = options({}, file)
    file.write_text("log-level: info\nport: 2\nmax-num-seqs: 3\napi-key: [secret-key]\n")
    assert read_settings(started) == (None, "info")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "--api-key, --max-num-seqs, --port" in record.getMessage()
    assert "secret-key" not in caplog.text


@pytest.mark.parametrize("text", ["port: nowhere\n", "no-such-option: 1\n", "[", None])
def test_a_file_that_cannot_be_used_leaves_the_settings(file: Path, caplog, text: str | None) -> None:
    started = options({}, file)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert read_settings(started) == (None, "info")
    assert "previous ones stay" in caplog.text


def test_a_reload_sets_the_log_level_of_the_engine() -> None:
    """Which may have another process than the server."""
    levels: list[tuple[str, str]] = []

    async def between_steps(function: Any) -> Any:
        return function()

    reloaded = Reload(
        lambda: Settings(None, "warning"),
        SimpleNamespace(reload=lambda: None),
        SimpleNamespace(between_steps=between_steps),
        SimpleNamespace(set_log_level=lambda level: levels.append(("engine", level))),
        None,
        tenants=read_tenants(None)[0],
        classes=read_tenants(None)[1],
        kv_tokens=64,
        policy="fcfs",
        recorded=False,
        set_level=lambda level: levels.append(("server", level)),
    )
    asyncio.run(reloaded())
    assert levels == [("server", "warning"), ("engine", "warning")]
