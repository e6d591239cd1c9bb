from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from headrace.lab.plan.capacity import Demand, Settings, Slo
from headrace.lab.plan.report import demand_lines, shape_line, sheet, sheet_table, trials_table, verdict_lines
from headrace.lab.plan.roofline import CPU, H100, H200, SHAPES, Replica, chunk, decoding
from headrace.lab.plan.search import Fleet, Supply, Trial, Verdict

EIGHT_B = SHAPES["llama-3.1-8b"]
SETTINGS = Settings(256, 2048)
REPLICA = Replica(EIGHT_B, H100)


def text_of(shown) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()


def test_a_sheet_agrees_with_the_roofline():
    reported = sheet(REPLICA, SETTINGS, 1024)
    assert reported.kv_bytes_per_token == 128 * 1024
    assert reported.kv_tokens == 16 * REPLICA.num_blocks(16, 2048, 256)
    assert reported.sequences == reported.kv_tokens // 1024
    assert [each.batch for each in reported.decode] == [1, 8, 32, 64, 128, 256]
    one = reported.decode[0]
    seconds = REPLICA.step_seconds(decoding(1, 1024))
    assert one.step_seconds == seconds
    assert one.tokens_per_second == 1 / seconds
    assert one.dollars_per_million == pytest.approx(1e6 * H100.dollars_per_hour / 3600 * seconds)
    assert reported.prefill_seconds == REPLICA.step_seconds(chunk(0, 1024, last=True))
    assert 0.4 < reported.prefill_mfu < 0.6
    assert reported.decode[-1].dollars_per_million < one.dollars_per_million / 50


def test_batches_that_do_not_fit_are_left_out():
    reported = sheet(Replica(SHAPES["qwen3-0.6b"], CPU), SETTINGS, 20_000)
    assert 0 < reported.sequences < 32
    assert [each.batch for each in reported.decode] == [1, 8]
    assert not sheet(Replica(SHAPES["llama-3.1-70b"], H100), SETTINGS, 1024).fits


def test_sheets_side_by_side():
    sheets = [sheet(Replica(EIGHT_B, H100), SETTINGS, 1024), sheet(Replica(EIGHT_B, H100, 2), SETTINGS, 1024)]
    line = shape_line(EIGHT_B, sheets)
    assert line.startswith("llama-3.1-8b: 8.03 B parameters, 128.0 KiB of KV cache per token; ")
    text = text_of(sheet_table(sheets))
    assert "2 x H100-SXM" in text
    assert "5.98" in text
    assert "decode 256: ms / tok/s" in text
    none = sheet(Replica(SHAPES["llama-3.1-70b"], H100), SETTINGS, 1024)
    assert "none" in text_of(sheet_table([none]))


def test_a_sheet_of_a_hybrid_has_its_states():
    hybrid = replace(EIGHT_B, state_bytes=20 << 20)
    sheets = [sheet(Replica(hybrid, H100), SETTINGS, 1024)]
    assert "KV cache per token, 20.0 MiB of states per sequence;" in shape_line(hybrid, sheets)
    assert 0 < sheets[0].kv_tokens < sheet(REPLICA, SETTINGS, 1024).kv_tokens
    assert f"{sheets[0].state_cells:,}" in text_of(sheet_table(sheets)).split("checkpoints of states")[1]


def test_a_verdict_in_words():
    demand = Demand(2.0, 1000, 500, 100, 1050, 1100, (1000,))
    assert "(50 % of them not cached)" in demand_lines(demand, Slo(1.0, 0.05))[0]
    fleet = Fleet(REPLICA, Settings(32, 2048), 2)
    trial = Trial(0.97, 0.5, 0.02, 200.0, 3)
    lines = verdict_lines(Verdict(fleet, trial, ((fleet, trial),), ()), demand)
    # 200 tokens a second are 0.72 million an hour.
    assert lines[0].startswith("cheapest  2 x H100-SXM: 5.98 $ per hour, 8.306 $ per million")
    assert lines[1] == "settings  --max-num-seqs 32 --max-num-batched-tokens 2048"
    assert "97.0 %" in lines[2]
    assert "97.0 %" in text_of(trials_table(Verdict(fleet, trial, ((fleet, trial),), ())))
    assert verdict_lines(Verdict(None, None, (), ("too slow",)), demand)[1] == "  too slow"


def test_a_simulation_that_was_too_short_is_said():
    demand = Demand(2.0, 1000, 500, 100, 1050, 1100, (1000,))
    fleet = Fleet(REPLICA, Settings(32, 2048), 2)
    for tokens, said in ((200.0, False), (181.0, False), (170.0, True)):
        trial = Trial(1.0, 0.5, 0.02, tokens, 0)
        lines = verdict_lines(Verdict(fleet, trial, ((fleet, trial),), ()), demand)
        assert any(line.startswith("warning   170 of 200 tokens/s") for line in lines) == said


def test_a_reserve_has_its_own_line_and_cost():
    demand = Demand(2.0, 1000, 500, 100, 1050, 1100, (1000,))
    fleet, trial = Fleet(REPLICA, Settings(32, 2048), 2), Trial(1.0, 0.5, 0.02, 200.0, 0, 0.012)
    supply = Supply(spot_share=0.5, spot_price=0.4, failures=0.01)
    lines = verdict_lines(Verdict(fleet, trial, ((fleet, trial),), ()), demand, supply)
    assert "100.0 % (± 1.2)" in lines[2]
    total = supply.replicas(2)
    assert lines[-1].startswith(f"to run    {total} replicas (50 % on spot machines)")
    assert f"{total * 2.99 * 0.7:.2f} $ per hour" in lines[-1]


def test_answers_of_one_token_have_no_time_per_token_to_show():
    demand = Demand(2.0, 1000, 500, 1, 1000, 1001, (1000,))
    fleet, trial = Fleet(REPLICA, Settings(32, 2048), 2), Trial(1.0, 0.5, math.nan, 2.0, 0)
    verdict = Verdict(fleet, trial, ((fleet, trial),), ())
    assert "TPOT p95 - ms" in verdict_lines(verdict, demand)[2]
    assert "nan" not in text_of(trials_table(verdict))


def test_a_sheet_of_several_devices_has_a_row_for_expert_parallel_and_dense_models_have_none():
    moe = SHAPES["qwen3-30b-a3b"]
    both, one = (sheet(Replica(moe, H200, degree), SETTINGS, 1024) for degree in (2, 1))
    assert [each.batch for each in both.expert_parallel] == [each.batch for each in both.decode]
    assert both.expert_parallel[0].step_seconds > both.decode[0].step_seconds
    assert both.expert_parallel[-1].step_seconds == pytest.approx(both.decode[-1].step_seconds, rel=0.01)
    text = text_of(sheet_table([both, one]))
    assert (
        f"{1e3 * both.expert_parallel[1].step_seconds:.2f} / " in text.split("decode 8, expert parallel")[1]
    )
    assert one.expert_parallel == ()
    assert "expert parallel" not in text_of(
        sheet_table([one, sheet(Replica(EIGHT_B, H100, 2), SETTINGS, 1024)])
    )


def test_a_sheet_of_a_cpu_shows_the_sequences_with_window_groups():
    settings = Settings(8, 512)
    cpu = sheet(Replica(SHAPES["gemma-3-1b"], CPU), settings, 32_768)
    per_token = 2 * 4 * 2 * 256  # bytes of a token in the four layers of a block
    blocks = 32_768 // 16 + 6 * ((512 + 512) // 16 + 1)
    assert cpu.windowed == pytest.approx(cpu.kv_tokens * 26 / 4 / 16 // blocks, abs=1)
    assert per_token * 26 / 4 == cpu.kv_bytes_per_token
    assert cpu.windowed > 4 * cpu.sequences
    assert f"with window groups │ {cpu.windowed:,}".replace(" ", "") in text_of(sheet_table([cpu])).replace(
        " ", ""
    )
    assert sheet(Replica(SHAPES["gemma-3-1b"], H100), settings, 32_768).windowed == 0
