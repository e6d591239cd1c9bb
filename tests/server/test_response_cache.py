"""The response caches as a user meets them: a real server, the official client, a restart."""

from openai import OpenAI

from tests.server.conftest import Server, serving

QUESTION = {
    "model": "builtin",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "temperature": 0,
    "max_tokens": 24,
}


def ask(server: Server, **more) -> tuple[str, str]:
    """What is said, and what the header says of it."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.with_raw_response.create(**QUESTION, **more)
        return answer.parse().choices[0].message.content, answer.headers["X-Headrace-Cache"]


def stream(server: Server) -> str:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        chunks = client.chat.completions.create(**QUESTION, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_cached_response_survives_a_restart(tmp_path):
    flags = ["--response-cache", "memory", "--response-cache", f"sqlite:{tmp_path / 'answers.db'}"]
    flags += ["--response-cache-timeout", "30"]  # a late lookup would be a miss
    flags += ["--price-per-million-prompt-tokens", "2", "--price-per-million-output-tokens", "10"]
    with serving(*flags) as server:
        first, note = ask(server)
        assert note == "miss"
        while (reported := ask(server))[1] == "coalesced":  # it is being written
            pass
        assert reported[0] == first
        assert stream(server) == first
        saved = server.get("/v1/cache/stats").json()["layers"]["exact"]
        assert (saved["hits"], saved["saved_output_tokens"]) == (2, 48)
        assert server.metric("response_cache_hits_total") >= 2
        assert saved["saved_cost"] == (saved["saved_prompt_tokens"] * 2 + 48 * 10) / 1e6
        server.stop()
    with serving(*flags) as server:
        text, note = ask(server)
        assert text == first
        assert note.startswith("hit; layer=exact")
        assert server.metric("generation_tokens_total") == 0
        assert ask(server, extra_headers={"Cache-Control": "no-cache"}) == (first, "miss")
        assert server.post("/v1/cache/clear", {"scope": "all"}).json()["stores"] == {
            "memory": True,
            "sqlite": True,
        }
        assert ask(server) == (first, "miss")
