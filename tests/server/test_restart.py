from __future__ import annotations

from tests.server.conftest import serving

PROMPT = (
    "Once upon a time there was a small dog who lived by the river with a cat and an old grey horse. " * 3
)
BODY = {"model": "builtin", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}


def test_a_server_finds_what_the_one_before_it_left(tmp_path):
    flags = ["--kv-offload-path", str(tmp_path), "--kv-offload-disk-bytes", str(64 << 20)]
    with serving(*flags) as first:
        answer = first.post("/v1/completions", BODY).json()
        assert first.stop() == 0
        assert any("are saved on disk for the next run" in line for line in first.lines)
    with serving(*flags) as second:
        assert any("blocks of the last run are on disk" in line for line in second.lines)
        again = second.post("/v1/completions", BODY).json()
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
        assert second.metric("kv_offload_hits_total") >= 3


def test_usage_survives_a_restart(tmp_path):
    flags = ["--usage-file", str(tmp_path / "usage.db"), "--device-price", "3600/h"]
    body = BODY | {"user": "alpha"}
    costs = []
    for runs in (1, 2):
        with serving(*flags) as server:
            server.post("/v1/completions", body)
            (usage,) = server.get("/v1/usage?tenant=alpha").json()["data"]
            assert sum(each["requests"] for each in usage["costs"]) == runs
            assert {each["model"] for each in usage["costs"]} == {"builtin"}
            assert usage["cost"] > max([0.0, *costs])
            costs.append(usage["cost"])
            assert server.stop() == 0
