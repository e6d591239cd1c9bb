"""A server that has been warmed, restarted and left, as its clients see it."""

import json
import time

import httpx

from tests.doubles.forks import run_forked
from tests.server.conftest import serving
from tests.server.test_lifecycle import begin_stream

BODY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
CACHED = ["--response-cache", "memory", "--warm-below-rate", "1000"]


def ask(server, **more):
    answer = server.post("/v1/completions", BODY | more)
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Headrace-Cache"], answer.json()["choices"][0]["text"]


def test_the_command_warms_a_running_server(tmp_path):
    with serving(*CACHED) as server:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
        (tmp_path / "requests.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / "system.txt").write_text("Be brief. " * 20)
        done = run_forked(
            *("-m", "headrace", "warm", str(tmp_path / "requests.jsonl")),
            *("--system-prompt", str(tmp_path / "system.txt"), "--url", server.url),
        )
        assert done.returncode == 0, done.stderr
        assert "2 computed, 0 cached already, 0 rejected" in done.stdout
        assert ask(server)[0].startswith("hit; layer=exact")
        messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "Hi"}]
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 40


def test_after_a_restart_the_questions_of_before_are_answered_before_it_is_ready(tmp_path):
    flags = [*CACHED, "--history-file", str(tmp_path / "history.db"), "--record-history"]
    with serving(*flags) as server:
        assert server.get("/health/ready").status_code == 200
        texts = [ask(server, prompt=f"Story {n}")[1] for n in range(4)]
        server.stop()
    with serving(*flags, "--warm-before-ready", "60") as server:
        ready = [server.get("/health/ready").status_code]
        while ready[-1] != 200:
            time.sleep(0.02)
            ready.append(server.get("/health/ready").status_code)
        for number, text in enumerate(texts):
            note, again = ask(server, prompt=f"Story {number}")
            assert note.startswith("hit; layer=exact")
            assert again == text
    with serving(
        *flags[:-1]
    ) as server:  # no words are recorded any more, and another model would compute anew
        assert ask(server, prompt="Secret story")[0] == "miss"
        server.stop()
    assert not any(b"Secret story" in path.read_bytes() for path in tmp_path.iterdir())


def test_the_most_wanted_answers_are_computed_anew_by_another_model_before_it_is_ready(tmp_path):
    flags = ["--response-cache", f"sqlite:{tmp_path / 'answers.db'}", "--response-cache-timeout", "30"]
    flags += ["--warm-below-rate", "1000"]
    flags += ["--history-file", str(tmp_path / "history.db"), "--record-history"]
    with serving(*flags, "--dtype", "bfloat16") as old:
        for _ in range(2):
            ask(old)
        old.stop()
    with serving(*flags, "--dtype", "float32", "--warm-before-ready", "60") as new:
        while new.get("/health/ready").status_code != 200:
            time.sleep(0.02)
        computed = new.metric("generation_tokens_total")
        assert computed == BODY["max_tokens"]
        while (note := ask(new)[0]) == "coalesced":  # it is being written
            time.sleep(0.02)
        assert note.startswith("hit; layer=exact")
        assert new.metric("generation_tokens_total") == computed


def test_a_disconnected_client_resumes_where_its_answer_was_interrupted():
    with serving(*CACHED) as server:
        long = BODY | {"max_tokens": 2000, "ignore_eos": True}
        whole = httpx.post(server.url + "/v1/completions", json=long | {"cache_salt": "x"}, timeout=60).json()
        connection = begin_stream(server.url, long)
        heard = 0
        while heard < 4000:
            heard += len(connection.recv(4096))
        connection.close()
        server.wait_until(lambda info: info["open_requests"] == 0)
        computed = server.metric("generation_tokens_total")
        note, text = ask(server, max_tokens=2000, ignore_eos=True)
        assert note == "partial"
        assert text == whole["choices"][0]["text"]
        assert server.metric("generation_tokens_total") - computed < 2000
        stats = server.get("/v1/cache/stats").json()["layers"]["partial"]
        assert (stats["hits"], stats["saved_prompt_tokens"]) == (1, 0)
        assert stats["saved_output_tokens"] == 2000 - (server.metric("generation_tokens_total") - computed)
