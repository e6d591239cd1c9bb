from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError


def test_doctor_checks_a_file_of_tenants_and_shows_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {weight: 3, tokens_per_day: 5000}}")
    result = CliRunner().invoke(app, ["doctor", "--tenants", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "tenant       acme: weight 3, class default, 5,000 tokens per day" in result.output
    file.write_text("tenants: {acme: {weigth: 3}}")
    with pytest.raises(ConfigError, match=r"acme\.weigth: there is no such field"):
        CliRunner().invoke(app, ["doctor", "--tenants", str(file)], catch_exceptions=False)
