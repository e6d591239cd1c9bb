"""``--speculative-config``: a JSON object, checked key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import ConfigError, SchedulerOptions, options
from headrace.config.objects.speculation import LOADED, METHODS, SpeculativeConfig, read_speculation
from headrace.wiring.drafting import PROPOSERS, make_drafter


def test_defaults() -> None:
    assert read_speculation("x", '{"method": "ngram"}') == SpeculativeConfig(("ngram",))


def test_every_key_is_read() -> None:
    given = {
        "method": ["suffix", "ngram", "suffix"],
        "num_speculative_tokens": 4,
        "adaptive": False,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 5,
        "suffix_max_bytes": "1MiB",
    }
    assert read_speculation("x", given) == SpeculativeConfig(("suffix", "ngram"), 4, False, 3, 5, 1 << 20)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("ngram", "expected a JSON object such as"),
        ("[1]", r"expected a JSON object such as .*, got \[1\]"),
        ("{}", "the key 'method' is missing: one of ngram"),
        (
            '{"method": "ngrams"}',
            "expected one of ngram, suffix, prediction, .*got 'ngrams'; did you mean ngram",
        ),
        ('{"method": []}', "or a list of them"),
        ('{"method": "mtp"}', "mtp: MTP layers are not supported, and no supported architecture has them"),
        ('{"method": ["ngram", "deepseek_mtp"]}', "deepseek_mtp: MTP layers are not supported"),
        ('{"method": "medusa", "model": "x"}', "medusa: EAGLE-3 heads are the only supported ones"),
        ('{"method": [3]}', "got 3"),
        ('{"method": "ngram", "num_speculative_token": 3}', "did you mean num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "a whole number from 1 to 64, got 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "a whole number from 1 to 64, got True"),
        ('{"method": "ngram", "adaptive": 1}', "expected true or false, got 1"),
        (
            '{"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}',
            "9 is above prompt_lookup_max 3",
        ),
        ('{"method": "draft_model"}', "method draft_model needs the key 'model'"),
        ('{"method": "eagle3"}', "method eagle3 needs the key 'model'"),
        (
            '{"method": ["eagle3", "draft_model"], "model": "x"}',
            "methods eagle3 and draft_model exclude each other",
        ),
        (
            '{"method": "eagle3", "model": "x", "quantization": "int8"}',
            "quantization needs the method draft_model$",
        ),
        ('{"method": "draft_model", "model": 3}', "model: expected a text, got 3"),
        ('{"method": "ngram", "model": "x"}', "model needs the method draft_model"),
        (
            '{"method": "draft_model", "model": "x", "quantization": "int2"}',
            "one of int8, int4, w4a8, got 'int2'",
        ),
        ('{"method": "suffix", "suffix_max_bytes": "many"}', "suffix_max_bytes: expected a size"),
        ('{"method": "suffix", "suffix_max_bytes": -1}', "suffix_max_bytes: expected a whole number"),
    ],
)
def test_what_is_wrong_is_named(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        options({"speculative_config": given})
    assert str(caught.value).startswith("--speculative-config: ")


def test_it_is_given_as_text_as_an_object_and_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  adaptive: false\n")
    by_file = options({}, file).scheduler.speculative_config
    by_object = options({"speculative_config": {"adaptive": False, "method": "ngram"}}, keywords=True)
    by_text = options({"speculative_config": '{"method": "ngram", "adaptive": false}'})
    assert by_file == by_object.scheduler.speculative_config == by_text.scheduler.speculative_config
    assert options({"speculative_config": None}).scheduler.speculative_config is None


def test_there_is_a_proposer_for_every_method() -> None:
    assert {*PROPOSERS, *LOADED} == set(METHODS)  # those need weights: see build.draft_models
    for method in METHODS:
        model = ', "model": "builtin-draft"' if method in LOADED else ""
        plans = SchedulerOptions(speculative_config=f'{{"method": "{method}"{model}}}')
        assert make_drafter(plans) is not None
    assert make_drafter(SchedulerOptions()) is None
