import pytest

from headrace.cli.bench.targets import _changed, make_server_target, make_target, read_spec
from headrace.config import PROFILES, ConfigError, ModelOptions, Options, options
from headrace.lab.workload.work import Work
from tests.cli.fake_server import running


@pytest.mark.parametrize(
    ("target", "reported"),
    [
        ("http://127.0.0.1:9,concurrency=many", "concurrency: expected a number"),
        ("http://127.0.0.1:9,concurrency=0", "concurrency: expected a number"),
        ("transformers-static,batch_size=-1", "batch_size: expected a number"),
        ("transformers-static,colour=red", "has no option colour"),
        ("transformers-static", "no/such/folder does not exist"),
        ("headrace,max_num_seqs=none", "--max-num-seqs"),
        ("somewhere", "expected a URL or one of"),
    ],
)
def test_a_target_that_cannot_be_had_is_one_line(target: str, reported: str) -> None:
    given = Options(model=ModelOptions(model="./no/such/folder"))
    with pytest.raises(ConfigError, match=reported):
        make_target(read_spec(target), given)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_target_has_what_the_command_was_given_though_that_is_the_default(profile: str) -> None:
    given = options({"profile": profile, "max_num_seqs": Options().scheduler.max_num_seqs, "block_size": 8})
    again = options(_changed(given))
    assert again.scheduler.max_num_seqs == Options().scheduler.max_num_seqs
    assert again.scheduler.mixed_prefill_ratio == PROFILES[profile]["mixed_prefill_ratio"]
    assert again.cache.block_size == 8


def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with running() as server:
        target = make_server_target("local", server.url, "")
        target.run([Work("a", "hello", 3)])
    assert target.facts() == {"kernels": "cpp avx2"}
    assert server.bodies[0]["model"] == "echo"
