"""YAML files of options, tenants and experiments, and JSON objects of options: a key that stands twice is refused."""

import pytest

from headrace.cli.experiment import read_experiment
from headrace.config import ConfigError, options, read_mapping
from headrace.wiring.tenants import read_tenants


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
        ("[" * 5000, "cannot be read as YAML"),
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
