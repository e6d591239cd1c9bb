from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli import app as cli
from headrace.cli.help import Command
from headrace.cli.options import duration, with_options
from headrace.config import (
    CacheOptions,
    ConfigError,
    ModelOptions,
    Options,
    ResponseCacheOptions,
    SchedulerOptions,
    SemanticOptions,
    ServerOptions,
)

PARTS = (
    ModelOptions,
    CacheOptions,
    SchedulerOptions,
    ServerOptions,
    ResponseCacheOptions,
    SemanticOptions,
)


def run(*words: str) -> tuple[Options, int]:
    """What a command gets from these words."""
    got: list[tuple[Options, int]] = []

    @with_options(*PARTS)
    def command(given: Options, extra: int = 1) -> None:
        """A command."""
        got.append((given, extra))

    app = typer.Typer()
    app.command(cls=Command)(command)
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert got, result.output
    return got[0]


@dataclass(frozen=True)
class Inner:
    depth: Annotated[int, typer.Option(min=1, help="Depth.")] = 2


@dataclass(frozen=True)
class Outer:
    needed: Annotated[str, typer.Option(help="Needed.")]
    inner: Inner = field(default_factory=Inner)


def test_a_parameter_of_a_dataclass_stands_for_the_flags_of_its_fields() -> None:
    got: list[tuple[Outer, int]] = []

    @with_options()
    def command(outer: Outer, extra: int = 1) -> None:
        """A command."""
        got.append((outer, extra))

    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, ["--needed", "x", "--depth", "3", "--extra", "4"]).exit_code == 0
    assert CliRunner().invoke(app, ["--needed", "y"]).exit_code == 0
    assert got == [(Outer("x", Inner(3)), 4), (Outer("y"), 1)]
    assert CliRunner().invoke(app, []).exit_code != 0, "a field without a default is required"
    assert CliRunner().invoke(app, ["--needed", "x", "--config", "f"]).exit_code != 0, (
        "it has no configuration"
    )


def test_no_words_give_the_defaults() -> None:
    assert run() == (Options(), 1)


@pytest.mark.parametrize(
    ("words", "model", "names"),
    [
        ("--served-model-name a", "builtin", ("a",)),
        ("some/model --served-model-name a", "some/model", ("a",)),
        ("some/model --served-model-name a b c", "some/model", ("a", "b", "c")),
        ("some/model --served-model-name a b --overlap 0", "some/model", ("a", "b")),
        ("--served-model-name a b --overlap 0 some/model", "some/model", ("a", "b")),
        ("--served-model-name a some/model", "some/model", ("a",)),
        ("--served-model-name a b some/model --overlap 0", "some/model", ("a", "b")),
        ("--overlap 0 --served-model-name a some/model", "some/model", ("a",)),
        ("some/model --served-model-name a --served-model-name b", "some/model", ("a", "b")),
        ("some/model --served-model-name=a", "some/model", ("a",)),
    ],
)
def test_several_names_may_follow_one_flag(words: str, model: str, names: tuple[str, ...]) -> None:
    given, _ = run(*words.split())
    assert (given.model.model, given.model.served_model_name) == (model, names)


@pytest.mark.parametrize(
    ("words", "models", "names"),
    [
        ("m --served-model-name a b", ["m"], ["a", "b"]),
        ("--served-model-name a b m --overlap 0", ["m"], ["a", "b"]),
        ("--served-model-name a b --overlap 0 m", ["m"], ["a", "b"]),
        ("m n --served-model-name a b", ["m", "n"], ["a", "b"]),
    ],
)
def test_names_of_a_server_are_not_taken_for_models(words: str, models: list[str], names: list[str]) -> None:
    serve = typer.main.get_command(cli).commands["serve"]  # type: ignore[attr-defined]
    given = serve.make_context("serve", words.split()).params
    assert (given["model"], given["served_model_name"]) == (models, names)


def test_flags_reach_their_parts() -> None:
    given, extra = run(
        "some/model", "--max-num-seqs", "7", "--no-enable-prefix-caching", "--overlap", "0",
        "--api-key", "a", "--api-key", "b", "--scheduling-policy", "static", "--extra", "5",
    )  # fmt: skip
    assert given.model.model == "some/model"
    assert given.scheduler.max_num_seqs == 7
    assert given.scheduler.overlap == 0
    assert given.scheduler.scheduling_policy == "static"
    assert given.cache.enable_prefix_caching is False
    assert given.server.api_key == ("a", "b")
    assert extra == 5


def test_a_flag_wins_over_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("block-size: 8\nport: 9\n")
    given, _ = run("--config", str(file), "--port", "10")
    assert (given.cache.block_size, given.server.port) == (8, 10)


def test_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="--block-size"):
        run("--block-size", "0")


def test_every_option_is_a_flag_with_help() -> None:
    @with_options(*PARTS)
    def command(given: Options) -> None:
        """A command."""

    app = typer.Typer()
    app.command()(command)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).output
    for part in PARTS:
        for each in fields(part):
            assert each.name.replace("_", "-") in shown.replace("_", "-")


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "-inf"])
def test_a_duration_of_a_command_is_finite_and_not_negative(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a finite duration of at least 0, got"):
        duration(text)


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--output"),
        ("simulate", "--export"),
        ("tune", "--workload", "a", "--output"),
        ("bench", "calibrate", "--output"),
        ("bench", "throughput", "--output"),
        ("bench", "sweep", "--output"),
        ("cache", "calibrate", "rows.jsonl", "--output"),
    ],
)
def test_a_folder_is_no_output_file_and_is_refused_before_the_work(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    result = CliRunner().invoke(cli, [*words, str(tmp_path)], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert result.exit_code == 2
    assert words[-1] in result.output
    assert "is a directory" in result.output
