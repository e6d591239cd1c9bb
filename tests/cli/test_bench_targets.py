import pytest

from headrace.cli.bench_targets import _changed, make_target, read_spec
from headrace.config import PROFILES, ConfigError, ModelOptions, Options, options


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("http://127.0.0.1:9,concurrency=many", "concurrency must be a number"),
        ("http://127.0.0.1:9,concurrency=0", "concurrency must be a number"),
        ("transformers-static,batch_size=-1", "batch_size must be a number"),
        ("transformers-static,colour=red", "has no option colour"),
        ("transformers-static", "no/such/folder does not exist"),
        ("headrace,max_num_seqs=none", "--max-num-seqs"),
        ("somewhere", "neither a URL nor"),
    ],
)
def test_a_target_that_cannot_be_had_is_one_line(target: str, told: str) -> None:
    given = Options(model=ModelOptions(model="./no/such/folder"))
    with pytest.raises(ConfigError, match=told):
        make_target(read_spec(target), given)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_target_has_what_the_command_was_given_though_that_is_the_default(profile: str) -> None:
    given = options({"profile": profile, "max_num_seqs": Options().scheduler.max_num_seqs, "block_size": 8})
    again = options(_changed(given))
    assert again.scheduler.max_num_seqs == Options().scheduler.max_num_seqs
    assert again.scheduler.mixed_prefill_ratio == PROFILES[profile]["mixed_prefill_ratio"]
    assert again.cache.block_size == 8
