import pytest

from headrace.cli.bench_targets import make_target, read_spec
from headrace.config import ConfigError, ModelOptions, Options


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
