from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli import app
from headrace.compute.kernels import select
from headrace.config import ConfigError


def test_doctor_says_what_of_the_processor_is_used() -> None:
    shown = " ".join(CliRunner().invoke(app, ["doctor"], catch_exceptions=False).output.split())
    assert "for torch and kernels together" in shown
    assert "allocator" in shown
    kernels = select("auto", torch.device("cpu"))
    assert f"kernels {kernels.name} ready" + (f": {kernels.isa}" if kernels.isa else "") in shown


def test_doctor_checks_a_file_of_tenants_and_shows_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {weight: 3, tokens_per_day: 5000}}")
    result = CliRunner().invoke(app, ["doctor", "--tenants", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "tenant       acme: weight 3, class default, 5,000 tokens per day" in result.output
    file.write_text("tenants: {acme: {weigth: 3}}")
    with pytest.raises(ConfigError, match=r"acme\.weigth: there is no such field"):
        CliRunner().invoke(app, ["doctor", "--tenants", str(file)], catch_exceptions=False)


@pytest.mark.usefixtures("quick_rates")
def test_doctor_compares_a_model_with_this_machine_by_its_parameters_and_those_of_a_token() -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", "qwen3-30b-a3b"], catch_exceptions=False)
    shown = " ".join(result.output.split())
    assert "model qwen3-30b-a3b: 30.53 B parameters, 3.35 B per token" in shown
    assert "weights bfloat16 56.87 GiB: " in shown
    assert "weights int4 15.89 GiB: " in shown
    with pytest.raises(ConfigError, match="the shapes known by name are"):
        CliRunner().invoke(app, ["doctor", "--model", "./nothing-like-this"], catch_exceptions=False)
