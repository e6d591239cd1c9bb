from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.peers import contenders
from benchmarks.peers.contenders import CONTENDERS, IN_PROCESS, MEANING, Demand
from benchmarks.peers.places import Places

DEMAND = Demand(rows=16, longest=1500, threads=2, kv_token_bytes=1000)


def command(name: str, precision: str = "bf16", demand: Demand = DEMAND) -> list[str]:
    return CONTENDERS[name].command(Places(Path("/peers")), Path("model"), 1234, demand, precision)


def test_every_contender_of_a_precision_can_be_started():
    for named in MEANING.values():
        assert named.keys() <= {*CONTENDERS, IN_PROCESS}


def test_the_memory_for_keys_and_values_holds_every_row_at_its_longest():
    assert DEMAND.kv_bytes >= 16 * 1500 * 1000
    given = command("llama.cpp")
    assert int(given[given.index("--ctx-size") + 1]) >= 16 * (1500 + 1)


@pytest.mark.parametrize("name", ["headrace", "llama.cpp", "vllm"])
def test_no_contender_is_given_fewer_rows_than_requests_are_open(name):
    given = command(name)
    assert given[given.index("--parallel" if name == "llama.cpp" else "--max-num-seqs") + 1] == "16"


def test_prefixes_are_kept_by_all_where_prompts_begin_alike_and_by_no_peer_elsewhere():
    alike = dataclasses.replace(DEMAND, prefix_caching=True)
    assert "--enable-prefix-caching" in command("vllm", demand=alike)
    assert "--no-enable-prefix-caching" in command("vllm")
    assert "--cache-ram" not in command("llama.cpp", demand=alike)
    assert "--cache-ram" in command("llama.cpp")
    for name in ("openvino", "transformers"):
        assert json.loads(command(name, demand=alike)[-1])["prefix_caching"] is True
        assert json.loads(command(name)[-1])["prefix_caching"] is False


def test_memory_that_is_given_in_whole_gib_is_not_rounded_down():
    demand = Demand(rows=16, longest=1500, threads=2, kv_token_bytes=60_000)
    given = CONTENDERS["vllm"].environment(demand)
    assert int(given["VLLM_CPU_KVCACHE_SPACE"]) << 30 >= demand.kv_bytes


@pytest.mark.parametrize("name", ["llama.cpp", "openvino"])
def test_a_conversion_that_was_interrupted_is_made_again(tmp_path, monkeypatch, name):
    """The tools are replaced by one that writes what it was told to write, and is interrupted halfway at first."""
    folder = tmp_path / "model"
    folder.mkdir()
    interrupted = [True]

    def convert(command: list[str], **_: object) -> None:
        target = Path(next(word for word in reversed(command) if word.startswith(f"{folder}/")))
        if name == "openvino":
            target.mkdir(exist_ok=True)
            target = target / "openvino_model.xml"
        target.write_text("half")
        if interrupted.pop():
            raise KeyboardInterrupt
        interrupted.append(False)
        target.write_text("whole")

    monkeypatch.setattr(contenders.subprocess, "run", convert)
    prepare = CONTENDERS[name].prepare
    with pytest.raises(KeyboardInterrupt):
        prepare(Places(tmp_path), folder, "int8")
    interrupted.append(False)
    made = prepare(Places(tmp_path), folder, "int8")
    assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"whole"}
    assert not list(folder.glob("*.part"))
    monkeypatch.setattr(contenders.subprocess, "run", None)
    assert prepare(Places(tmp_path), folder, "int8") == made  # and is not made twice
