"""Help in groups at the terminal's width, and advice for options of other engines."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from headrace import __version__
from headrace.cli import app
from headrace.cli.help import Command, _each_module_flagged, help_text
from headrace.config import TITLES, ConfigError

GROUP = typer.main.get_command(app)
COMMANDS = [
    *((name,) for name, command in GROUP.commands.items() if isinstance(command, Command)),
    *((group, name) for group in ("bench", "cache") for name in GROUP.commands[group].commands),
]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def text_of(*names: str, whole: bool, width: int) -> str:
    command = GROUP
    for name in names:
        command = command.commands[name]
    return help_text(command, typer.Context(command, info_name=" ".join(names)), whole=whole, width=width)


def test_version_and_short_help() -> None:
    assert run("--version") == f"headrace {__version__}\n"
    assert run("serve", "-h") == run("serve", "--help")


def test_help_shows_common_options_in_the_groups_of_the_reference() -> None:
    short, whole = run("serve", "--help"), run("serve", "--help-all")
    groups = [f"\n{title}:\n" for title in TITLES.values()]
    assert all(group in short and group in whole for group in groups)
    assert [whole.index(group) for group in groups] == sorted(whole.index(group) for group in groups)
    assert "--max-num-seqs" in short
    assert "--static-batch-timeout" not in short
    assert "--static-batch-timeout" in whole
    assert "--help-all" in short


def test_common_options_come_first_in_their_group() -> None:
    server = run("serve", "--help-all").partition("\nServer:\n")[2]
    assert server.index("--api-key-file") < server.index("--allowed-origins")


def test_defaults_have_their_units() -> None:
    shown = " ".join(run("serve", "--help-all").split())
    assert "Memory limit of the in-process response cache (default: 256MiB)." in shown
    assert "Time after which a request ends with status 408 (default: 10m)." in shown


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_lines_fit_the_terminal(names: tuple[str, ...], width: int) -> None:
    lines = text_of(*names, whole=True, width=width).splitlines()
    assert all(len(line) <= width or " " not in line.strip() for line in lines[2:]), max(lines, key=len)


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_parameter_has_a_help_text_that_stands_alone(names: tuple[str, ...]) -> None:
    command = GROUP
    for name in names:
        command = command.commands[name]
    for each in command.params:
        assert each.help, each.name
        assert each.help[0].isupper() or each.help[0].isdigit(), f"{each.name}: {each.help}"
        assert each.help.endswith("."), f"{each.name}: {each.help}"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("serve", "--tp", "2"), "there is no option --tp: use --tensor-parallel-size"),
        (("serve", "--num-shard=2"), "there is no option --num-shard: use --tensor-parallel-size"),
        (("serve", "--fully-sharded-loras"), "--fully-sharded-loras: an adapter is never divided"),
        (("serve", "--speculative-config", "{}"), "--speculative-config: the key 'method' is missing"),
        (("serve", "--model", "x"), "--model: give the model as an argument: headrace serve MODEL"),
        (("bench", "throughput", "--swap-space", "4"), "--kv-offload-bytes 4GiB"),
        (("serve", "ollama:llama3"), "MODEL ollama:llama3: Ollama's model names are not known here"),
    ],
)
def test_what_other_engines_take_is_answered_with_what_to_do(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("plan", "--context", "x"), "--context: expected a whole number"),
        (("plan", "--context", "0"), "--context: expected a number of at least 1"),
        (("plan", "--speedup", "fast"), "--speedup: expected a number"),
        (("plan", "--slo-ttft", "soon"), "--slo-ttft: expected a duration such as 500ms"),
        (("serve", "--port", "x"), "--port: expected a whole number from 0 to 65535, got 'x'"),
        (("serve", "--dtype", "bf16"), "--dtype: expected one of auto, bfloat16"),
    ],
)
def test_a_wrong_value_is_answered_in_plain_words(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert what in str(refused.value)


def test_a_typo_of_a_flag_is_answered_with_the_closest() -> None:
    result = CliRunner().invoke(app, ["serve", "--max-num-seq", "2"])
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.output


def test_several_adapters_may_follow_one_flag() -> None:
    words = [
        "--lora-modules",
        "a=/x",
        '{"name": "b", "path": "/y"}',
        "MODEL",
        "--port",
        "1",
        "--lora-modules",
        "c=/z",
    ]
    assert _each_module_flagged(words) == [
        *("--lora-modules", "a=/x", "--lora-modules", '{"name": "b", "path": "/y"}', "MODEL", "--port", "1"),
        *("--lora-modules", "c=/z"),
    ]
