from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from headrace.core.events import Finished
from headrace.core.request import FinishReason
from headrace.lab.replay.exact import Replay
from headrace.lab.replay.trace import read_trace
from headrace.observe.trace_file import Cancelled
from headrace.wiring.recording import make_engine_again
from tests.server.conftest import serving


def test_a_server_that_was_killed_leaves_a_trace_that_replays(tmp_path):
    path = tmp_path / "trace.jsonl"
    secret = "Once upon a time there was a very secret fox. "
    with serving("--record-trace", str(path), "--max-num-seqs", "2") as server:

        def ask(number: int) -> None:
            body = {
                "model": "builtin",
                "prompt": secret + str(number % 3),
                "max_tokens": 30,
                "temperature": 0,
            }
            body |= {"ignore_eos": True, "stop": [" "] if number % 2 else None}
            assert server.post("/v1/completions", body).status_code == 200

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(8)))
        assert server.post("/reset_prefix_cache").status_code == 200
        server.wait_until(lambda _: "reset" in path.read_text())
        ask(0)
        server.process.kill()  # no time to close anything
    trace = read_trace(path)
    replay = Replay(trace, make_engine_again)
    events = [event for scene in replay.scenes() for event in scene.events]
    assert replay.divergence is None
    ended = [event.request_id for event in events if isinstance(event, Finished)]
    assert sum(not each.startswith("warm-up") for each in ended) in (
        8,
        9,
    )  # what came last may not have been written yet
    assert any(each.why is FinishReason.STOP for each in trace.of(Cancelled))
    assert "secret" not in path.read_text()
