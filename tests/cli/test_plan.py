from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError

CHAT = "rate=2,prompt=uniform:200:400,answer=uniform:20:60"


def run(*words) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "220"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def reported(*words):
    return json.loads(run(*words, "--json"))


def test_a_sheet_of_every_device():
    text = run("llama-3.1-8b")
    assert "llama-3.1-8b: 8.03 B parameters, 128.0 KiB of KV cache per token" in text
    for name in ("1 x A100-80G", "1 x H100-SXM", "1 x H200", "1 x MI300X", "1 x cpu"):
        assert name in text
    assert "simulated" not in text


def test_a_model_too_large_for_one_device_is_shown_on_several():
    sheets = {each["device"]: each for each in reported("llama-3.1-70b")["sheets"]}
    assert (sheets["H100-SXM"]["degree"], sheets["H200"]["degree"]) == (2, 2)
    assert sheets["cpu"]["sequences"] == 0


def test_quantized_weights_and_cache_take_less():
    plain = reported("qwen3-8b", "--device", "H200")["sheets"][0]
    small = reported("qwen3-8b", "--device", "h200", "--weights", "int4", "--kv", "int8")["sheets"][0]
    assert small["weight_bytes"] < plain["weight_bytes"] / 2
    assert small["kv_tokens"] > 1.9 * plain["kv_tokens"]


def test_a_folder_with_a_config_is_a_model(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = reported(tmp_path, "--device", "cpu")["model"]
    assert (model["num_layers"], model["head_dim"]) == (2, 16)
    assert model["num_parameters"] == 2 * (64 * 16 * 12 + 3 * 64 * 128 + 128) + 64 + 2 * 64_000


def test_the_cheapest_fleet_for_a_workload_is_found_and_simulated():
    flags = ["--device", "A100-80G", "--device", "H100-SXM", "--workload", CHAT, "--requests", 40]
    verdict = reported("llama-3.1-8b", *flags, "--price", "H100-SXM=9")["verdict"]
    assert verdict["best"]["device"] == "A100-80G"
    assert (verdict["best"]["replicas"], verdict["best"]["degree"]) == (1, 1)
    assert verdict["tried"][0]["attained"] >= 0.95
    assert verdict["tried"][0]["output_tokens_per_second"] > 0
    dearer = reported("llama-3.1-8b", *flags, "--price", "a100-80g=20", "--price", "H100-SXM=1")["verdict"]
    assert dearer["best"]["device"] == "H100-SXM"


def test_fleets_with_prefill_replicas_are_considered_if_asked_for():
    long = "rate=30,prompt=uniform:1500:2500,answer=uniform:10:20"
    words = ("llama-3.1-8b", "--device", "H100-SXM", "--workload", long, "--requests", 16, "--max-devices", 8)
    words += ("--slo-ttft", 2, "--slo-tpot", 0.0075)
    tried = reported(*words, "--disaggregate")["verdict"]["tried"]
    apart = [each for each in tried if each["prefill_replicas"]]
    assert apart
    assert all(0 < each["prefill_replicas"] < each["replicas"] for each in apart)
    assert not any(each["prefill_replicas"] for each in reported(*words)["verdict"]["tried"])


def test_a_fleet_in_words():
    text = run("llama-3.1-8b", "--device", "H100-SXM", "--workload", CHAT, "--requests", 40)
    assert "demand    2" in text
    assert "cheapest  1 x H100-SXM: 2.99 $ per hour" in text
    assert "settings  --max-num-seqs" in text


UNEVEN = "rate=20,prompt=100,answer=lognormal:60:1"


def test_idle_time_is_paid_for_and_continuous_batching_is_cheaper_than_static():
    words = ("llama-3.1-8b", "--device", "H100-SXM", "--workload", UNEVEN, "--requests", 80)
    full, half = (reported(*words, "--utilization", share, "--api-price", "0.1:0.5") for share in (1, 0.5))
    name = "dollars_per_million_output_tokens"
    assert half["prices"][name] == pytest.approx(2 * full["prices"][name])
    name = "prefill_dollars_per_million"
    assert half["sheets"][0][name] == pytest.approx(2 * full["sheets"][0][name])
    name = "break_even_utilization"
    assert half["prices"]["api"][name] == full["prices"]["api"][name]
    continuous, static = full["prices"]["batching"]
    assert (continuous["policy"], static["policy"]) == ("continuous", "static")
    assert static["dollars_per_million_output_tokens"] > 1.3 * continuous["dollars_per_million_output_tokens"]
    assert "prices" not in reported(*words), "only where asked for"


def test_prices_in_words():
    words = ("llama-3.1-8b", "--device", "H100-SXM", "--workload", UNEVEN, "--requests", 80)
    text = run(*words, "--utilization", 0.25, "--api-price", "0.1:0.5")
    assert "$ per M output tokens at 25 % utilization" in text
    assert "$ per million output tokens at 25 % of this load" in text
    assert "1 x H100-SXM at full load: 20 slots, all requests waiting, no latency targets" in text
    assert "slots were used" in text
    assert "API       0.1 $ per million input and 0.5 $ per million output tokens" in text
    assert "break-even" in text


def test_that_none_fits_comes_with_reasons():
    text = run("llama-3.1-70b", "--device", "cpu", "--workload", CHAT, "--requests", 10)
    assert "no fleet meets the latency targets:" in text
    assert "1 x cpu: weights of 141.1 GB" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "T4"], "--device: there is no device 'T4'"),
        (["--weights", "int3"], "--weights int3: expected one of bfloat16"),
        (["--kv", "int4"], "--kv int4"),
        (["--price", "H100-SXM=free"], "expected DEVICE=DOLLARS"),
        (["--price", "H100-SXM=0"], "expected DEVICE=DOLLARS"),
        (["--price", "T4=1"], "--price T4=1: there is no device 'T4'"),
        (["--device", "H200", "--price", "cpu=1"], "cpu is not among the devices"),
        (["--utilization", "0"], "--utilization 0: expected a share above 0 and at most 1"),
        (["--utilization", "1.5"], "--utilization 1.5: expected a share"),
        (["--utilization", "nan"], "--utilization nan: expected a share"),
        (["--api-price", "1:2"], "--api-price compares a fleet with an API: give its workload"),
        (["--api-price", "1", "--workload", CHAT], "--api-price 1: expected INPUT:OUTPUT"),
        (["--api-price", "1:-2", "--workload", CHAT], "--api-price 1:-2: expected INPUT:OUTPUT"),
        (["--api-price", "0:0", "--workload", CHAT], "--api-price 0:0: expected INPUT:OUTPUT"),
        (["--api-price", "1:2:3", "--workload", CHAT], "--api-price 1:2:3: expected INPUT:OUTPUT"),
        (["--workload", "colour=red"], "colour=red"),
        (["--workload", CHAT, "--routing", "best"], "--routing best: expected one of"),
        (["no/such/model/at/all"], "shapes known by name are"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, message):
    with pytest.raises(ConfigError, match=message):
        run(*words)


@pytest.mark.parametrize("rest", [b"3.5,many,3\n", b"\xff\xfe\n"])
def test_a_trace_that_breaks_in_the_middle_is_one_line(tmp_path, rest):
    path = tmp_path / "t.csv"
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n" + rest)
    with pytest.raises(ConfigError, match=r"t\.csv"):
        run("--device", "H200", "--trace", path)


def test_drafts_make_a_fleet_cheaper():
    words = ("llama-3.1-8b", "--device", "H100-SXM", "--workload", CHAT)
    words += ("--requests", "80", "--slo-tpot", "0.004")
    plain, drafted = reported(*words), reported(*words, "--acceptance", "0.8")
    dollars = [each["verdict"]["best"]["dollars_per_hour"] for each in (plain, drafted)]
    assert dollars[1] < dollars[0]
    first = [each["sheets"][0]["decode"][0] for each in (plain, drafted)]
    assert first[0]["drafts"] == 0 < first[1]["drafts"]
    assert first[1]["tokens_per_second"] > 2 * first[0]["tokens_per_second"]
    assert "drafts)" in run("llama-3.1-8b", "--acceptance", "0.8", "--draft-cost", "0.1")


LARGE = ("qwen3-0.6b", "--device", "H100-SXM", "--workload", CHAT, "--requests", 60, "--max-devices", 10_000)


def test_a_fleet_of_hundreds_is_planned_from_a_sample():
    plan = reported(*LARGE, "--rate", 1_000_000)
    assert plan["demand"]["requests_per_second"] == pytest.approx(1_000_000)
    best = plan["verdict"]["best"]
    assert best["replicas"] > 100
    assert plan["verdict"]["supply"]["replicas"] == best["replicas"], "nothing fails unless a flag says so"
    trial = plan["verdict"]["tried"][0]
    assert trial["error"] is not None
    assert trial["output_tokens_per_second"] > 1_000_000, "of the whole fleet, not of the sample"


def test_spot_machines_need_a_reserve_and_cost_less():
    text = run(*LARGE, "--rate", 1_000_000, "--spot-share", 0.5, "--spot-price", 0.4, "--failures", 0.01)
    (line,) = [line for line in text.splitlines() if line.startswith("to run")]
    assert "50 % on spot machines" in line
    plan = reported(*LARGE, "--rate", 1_000_000, "--spot-share", 0.5, "--failures", 0.01)["verdict"]
    assert plan["supply"]["replicas"] > plan["best"]["replicas"]


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="--rate 0"):
        run(*LARGE, "--rate", 0)
