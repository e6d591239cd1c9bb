from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from headrace.cli.experiment import read_experiment
from headrace.config import (
    PARTS,
    PROFILES,
    ConfigError,
    Options,
    changed_options,
    model_options,
    options,
    profile_line,
    read_mapping,
    reread,
)
from headrace.config.errors import ADVICE, advice
from headrace.config.sources import MAX_YAML_BYTES
from headrace.config.values import unit_of
from headrace.wiring.tenants import read_tenants


def test_defaults_are_those_of_the_parts() -> None:
    assert options({}) == Options()


def test_an_option_is_named_once() -> None:
    names = [each.name for kind in PARTS.values() for each in fields(kind)]
    assert len(names) == len(set(names))


def test_what_is_given_wins_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nblock-size: 8\nmax_num_seqs: 3\n")
    monkeypatch.setenv("HEADRACE_PORT", "2")
    monkeypatch.setenv("HEADRACE_BLOCK_SIZE", "4")
    merged = options({"port": 3}, file)
    assert (merged.server.port, merged.cache.block_size, merged.scheduler.max_num_seqs) == (3, 4, 3)


def test_environment_lists_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "one,two")
    assert options({}).server.api_key == ("one", "two")


def test_spaces_around_commas_are_no_part_of_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ALLOWED_ORIGINS", "https://a.example, https://b.example")
    assert options({}).server.allowed_origins == ("https://a.example", "https://b.example")


def test_a_variable_that_is_no_option_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "4")
    with pytest.raises(
        ConfigError, match="HEADRACE_MAX_NUM_SEQ names no option; did you mean HEADRACE_MAX_NUM_SEQS"
    ):
        options({})


@pytest.mark.parametrize("service", ["", "CANARY_", "METRICS_"])
def test_variables_that_kubernetes_sets_for_a_service_are_no_options(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod beside a Service with the name ``headrace``, ``headrace-canary`` or ``headrace-metrics``."""
    link = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
        "PORT_53_UDP": "udp://10.0.0.1:53",
        "PORT_9_SCTP": "sctp://10.0.0.1:9",
    }
    for name, value in link.items():
        monkeypatch.setenv(f"HEADRACE_{service}{name}", value)
    assert options({}) == Options()


def test_a_port_that_is_no_address_of_a_service_is_still_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "81")
    assert options({}).server.port == 81
    monkeypatch.setenv("HEADRACE_PORT", "eighty")
    with pytest.raises(ConfigError, match="HEADRACE_PORT"):
        options({})


def test_options_are_read_again_from_where_they_came(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nlog-level: info\n")
    old = options({"block_size": 8}, file)
    file.write_text("port: 2\nlog-level: debug\n")
    new = reread(old)
    assert (new.server.port, new.observability.log_level, new.cache.block_size) == (2, "debug", 8)
    assert changed_options(old, new) == ["port", "log_level"]


def test_every_default_can_be_given_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for part, kind in PARTS.items():
        for each in fields(kind):
            default = getattr(getattr(Options(), part), each.name)
            if default not in (None, ()):
                with monkeypatch.context() as alone:
                    alone.setenv(f"HEADRACE_{each.name.upper()}", str(default))
                    assert options({}) == Options(), each.name


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"block_size": 0}, "--block-size"),
        ({"dtype": "int3"}, "--dtype"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"max_model_len": "long"}, "--max-model-len"),
        ({"port": 70_000}, "--port"),
        ({"max_num_queued_reqs": 0}, "--max-num-queued-reqs"),  # nothing could ever come in
        ({"mixed_prefill_ratio": "inf"}, "--mixed-prefill-ratio: expected a finite number of at least 0"),
        ({"mixed_prefill_ratio": float("nan")}, "--mixed-prefill-ratio"),
        ({"port": True}, "--port"),  # a switch is no number
        ({"max_model_len": True}, "--max-model-len"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_a_wrong_value_is_refused_by_name(given: dict[str, object], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        options(given)


@pytest.mark.parametrize("content", ["- a list", "port: [", "no_such: 1", "seed: 2026-13-45"])
def test_a_wrong_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        options({}, file)


@pytest.mark.parametrize(
    ("content", "keys"), [("api-key: first", ("first",)), ("api-key: [first, second]", ("first", "second"))]
)
def test_one_value_of_a_list_needs_no_brackets(tmp_path: Path, content: str, keys: tuple[str, ...]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    assert options({}, file).server.api_key == keys


@pytest.mark.parametrize("name", ["api_key", "response_cache_secret"])
def test_a_secret_of_the_wrong_type_is_not_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: expected text") as refused:
        options({name: [20201]} if name == "api_key" else {name: 20201})
    assert "20201" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        options({}, tmp_path / "none.yaml")


def test_the_balanced_profile_is_the_defaults_and_all_name_the_same_options() -> None:
    assert options({"profile": "balanced"}) == Options()
    assert len({tuple(values) for values in PROFILES.values()}) == 1


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_sets_options_that_are_not_set_elsewhere(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"profile: {profile}\nmax-num-seqs: 5\n")
    monkeypatch.setenv("HEADRACE_MAX_STEP_SECONDS", "0.5")
    chosen = options({"queue_order": "shortest"}, file)
    plans = chosen.scheduler
    assert (plans.max_num_seqs, plans.max_step_seconds, plans.queue_order) == (5, 0.5, "shortest")
    assert plans.mixed_prefill_ratio == PROFILES[profile]["mixed_prefill_ratio"]
    assert chosen.server.max_num_queued_reqs == PROFILES[profile]["max_num_queued_reqs"]


def test_a_profile_is_printed_in_full() -> None:
    line = profile_line(options({"profile": "interactive", "max_num_seqs": 8}))
    assert line.startswith("interactive: ")
    assert "max-num-seqs 8 (profile default 32)" in line
    assert all(f"{name.replace('_', '-')} " in line for name in PROFILES["interactive"])


def test_there_is_no_other_profile() -> None:
    with pytest.raises(ConfigError, match="--profile"):
        options({"profile": "fast"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("512MB", 512_000_000), ("2GiB", 2 << 30), ("1.5 gib", 3 << 29), ("64Ki", 1 << 16)],
)
def test_a_size_may_have_a_unit_in_every_source(
    text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options({"kv_cache_memory_bytes": text}).cache.kv_cache_memory_bytes == size
    file = tmp_path / "serve.yaml"
    file.write_text(f"kv-cache-memory-bytes: {text}\n")
    assert options({}, file).cache.kv_cache_memory_bytes == size
    monkeypatch.setenv("HEADRACE_KV_CACHE_MEMORY_BYTES", text)
    assert options({}).cache.kv_cache_memory_bytes == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30.0),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("30s", 30.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1 d", 86400.0),
    ],
)
def test_a_duration_may_have_a_unit(text: str, seconds: float) -> None:
    assert options({"request_timeout": text}).server.request_timeout == seconds


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (
            {"kv_cache_memory_bytes": "2 gigs"},
            "--kv-cache-memory-bytes: expected a size such as 512MB or 2GiB",
        ),
        ({"kv_cache_memory_bytes": "1.5"}, "expected a size"),
        ({"request_timeout": "soon"}, "--request-timeout: expected a duration such as 500ms, 30s"),
        ({"request_timeout": "5m oops"}, "--request-timeout: expected a duration"),
        ({"block_size": 0}, "--block-size: expected a whole number from 1 to 1024, got 0"),
        ({"scheduling_policy": "fairr"}, r"expected one of fair, .*did you mean fair\?"),
    ],
)
def test_an_error_says_which_forms_are_accepted(given: dict[str, object], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        options(given)


def test_a_typo_is_answered_with_the_closest_name(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seq: 4\n")
    with pytest.raises(
        ConfigError, match=r"serve\.yaml: there is no option 'max-num-seq'; did you mean max-num-seqs"
    ):
        options({}, file)
    with pytest.raises(ConfigError, match="no keyword argument 'max_num_seq'; did you mean max_num_seqs"):
        options({"max_num_seq": 4}, keywords=True)


@pytest.mark.parametrize("name", ["data_parallel_size", "lora_dtype", "speculative_model", "ctx_size"])
def test_an_option_of_another_engine_is_answered_with_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = re.escape(advice(name) or "")
    file = tmp_path / "serve.yaml"
    file.write_text(f"{name.replace('_', '-')}: 2\n")
    with pytest.raises(ConfigError, match=what):
        options({}, file)
    with pytest.raises(ConfigError, match=what):
        options({name: 2}, keywords=True)
    monkeypatch.setenv(f"HEADRACE_{name.upper()}", "2")
    with pytest.raises(ConfigError, match=what):
        options({})


def test_advice_is_given_for_no_option_that_exists() -> None:
    names = {each.name for kind in PARTS.values() for each in fields(kind)}
    assert not names - {"model"} & set(ADVICE)


def test_a_name_of_ollama_is_answered_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="MODEL ollama/llama3: Ollama's model names are not known here"):
        options({"model": "ollama/llama3"})


def test_what_was_chosen_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "2")
    assert options({"block_size": 16}).chosen == {"port", "block_size"}
    assert "max_num_seqs" in options({"profile": "throughput"}).chosen


@pytest.mark.parametrize("kind", PARTS.values())
def test_sizes_and_durations_take_units(kind: type) -> None:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        unit = unit_of(get_args(hint)[1])
        if name.endswith("_bytes"):
            assert unit == "bytes", name
        if name.endswith(("_seconds", "_timeout", "_ttl", "_deadline", "_seconds_per_hour")):
            assert unit == "seconds", name


@pytest.mark.parametrize("kind", PARTS.values())
def test_every_help_text_is_a_sentence_or_a_noun_phrase(kind: type) -> None:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        text = get_args(hint)[1].description
        assert text[0].isupper() or text[0].isdigit(), f"{name}: {text}"
        assert text.endswith("."), f"{name}: {text}"


BOMB = "a0: &a0 [x, x]\n" + "\n".join(
    f"a{level}: &a{level} {{0}}{', '.join([f'*a{level - 1}'] * 9)}{{1}}" for level in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "\n".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}" for level in range(1, 10)
)
"""Lists and merges of aliases of which each line stands for nine of the line before."""


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "file.yaml"
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nhost: a\nport: 2\n", "the key 'port' stands twice, in lines 1 and 3"),
        ("port: 1\n'port': 1\n", "the key 'port' stands twice, in lines 1 and 2"),
        ("{port: 1, port: 2}", "the key 'port' stands twice, in lines 1 and 1"),
        ("a:\n  - b: {c: 1}\n    b: 2\n", "the key 'b' stands twice, in lines 2 and 3"),
        ("? [a, b]\n: 1\n", "cannot be read as YAML"),
        ("- port\n", "must hold one mapping"),
        ("port", "must hold one mapping"),
        ("[" * 1000, "cannot be read as YAML: its lists and mappings are nested too deeply"),
        ("a: " + "[" * 65 + "]" * 65, "nested more than 64 deep"),
        ("a: &a [*a]", "nested more than 64 deep"),
        (BOMB.format("[", "]"), "with its aliases it has more than 500,000 values"),
        (MERGES, "with its aliases it has more than 500,000 values"),
        ("#" * (MAX_YAML_BYTES + 1), "it has 8,388,609 bytes, and the limit is 8,388,608"),
    ],
)
def test_what_is_no_mapping_with_each_key_once_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_mapping(write(text), "the file")
    assert str(error.value).startswith("the file")


def test_a_key_beside_a_merge_overrides_it(write):
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\n"
    assert read_mapping(write(text), "f")["other"] == {"a": 1, "b": 3}
    assert read_mapping(write(""), "f") == {}


def test_every_reader_refuses_a_key_that_stands_twice(write):
    with pytest.raises(ConfigError, match=r"file\.yaml: the key 'port' stands twice, in lines 1 and 2"):
        options({}, write("port: 1\nport: 2\n"))
    with pytest.raises(
        ConfigError, match=r"file\.yaml: the option max-num-seqs stands twice, with - and with _"
    ):
        options({}, write("max-num-seqs: 1\nmax_num_seqs: 2\n"))
    with pytest.raises(ConfigError, match=r"--tenants .*: the key 'acme' stands twice"):
        read_tenants(str(write("tenants:\n  acme: {weight: 1}\n  acme: {weight: 2}\n")))
    with pytest.raises(ConfigError, match=r"file\.yaml: the key 'metric' stands twice"):
        read_experiment(write("metric: a\nmetric: b\n"))
    with pytest.raises(ConfigError, match=r"speculative-config: .* the key 'method' stands twice"):
        options({"speculative_config": '{"method": "ngram", "method": "suffix"}'})


def several(**given):
    return model_options([options(given)])


def test_models_have_their_own_options_before_common_ones(tmp_path, monkeypatch):
    file = tmp_path / "models.yaml"
    file.write_text(
        "max-num-seqs: 3\nblock-size: 32\n"
        "models:\n  - model: a\n    max-num-seqs: 7\n  - {model: b, served-model-name: [x, y]}\n"
    )
    monkeypatch.setenv("HEADRACE_SEED", "5")
    one, two = model_options([options({"max_model_len": 100}, file)])
    assert (one.model.model, one.scheduler.max_num_seqs, one.cache.block_size) == ("a", 7, 32)
    assert (two.model.model, two.scheduler.max_num_seqs, two.model.served_model_name) == ("b", 3, ("x", "y"))
    assert {each.model.max_model_len for each in (one, two)} == {100}
    assert {each.model.seed for each in (one, two)} == {5}
    again = [
        options(each.source.given, each.source.file) for each in (one, two)
    ]  # as their processes read them
    assert again == [one, two]


def test_without_a_list_the_options_are_those_that_were_given():
    given = [options({"model": name}) for name in ("a", "b")]
    assert model_options(given) == given


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("{", "expected a JSON list"),
        ({"model": "a"}, "expected a list of objects"),
        ([], "expected a list of objects"),
        (["a"], "expected a list of objects"),
        ([{"model": 1}], r"\[0\]: model is missing"),
        ([{"model": "a", "api-key": "x"}], r"\[0\]: api-key is an option of the whole server"),
        ([{"model": "a", "models": []}], "models is an option of the whole server"),
        ([{"model": "a", "max-num-seqs": 1, "max_num_seqs": 2}], "stands twice"),
        ([{"model": "a"}, {"model": "b", "nothing": 1}], r"models\[1\] \(b\): there is no option 'nothing'"),
        ([{"model": "a", "block-size": 0}], r"models\[0\] \(a\): --block-size"),
        ([{"model": "a", "usage-file": "u"}, {"model": "b", "usage-file": "u"}], "cannot share it"),
    ],
)
def test_lists_of_models_that_are_refused(models, message):
    with pytest.raises(ConfigError, match=message):
        several(models=models)
