"""The official client, unchanged, against a real server."""

import asyncio

import openai
import pytest

HELLO = [{"role": "user", "content": "Tell me a story about Anna."}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def aclient(server):
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "builtin"
    assert client.models.retrieve("builtin").object == "model"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.code == "model_not_found"


def test_chat(client):
    answer = client.chat.completions.create(model="builtin", messages=HELLO, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.system_fingerprint
    assert answer._request_id


def test_a_stream_says_what_the_whole_answer_says(client):
    asked = {"model": "builtin", "messages": HELLO, "max_completion_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert len({c.id for c in chunks}) == 1


def test_the_streaming_helper(client):
    with client.chat.completions.stream(model="builtin", messages=HELLO, stop=".", temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content


def test_several_answers_differ_and_are_repeatable(client):
    def ask(**more):
        answer = client.chat.completions.create(
            model="builtin", messages=HELLO, max_tokens=20, n=3, seed=7, temperature=1.5, **more
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_several_answers_stream_interleaved(client):
    texts = {}
    for chunk in client.chat.completions.create(
        model="builtin", messages=HELLO, max_tokens=10, n=2, seed=7, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert sorted(texts) == [0, 1]
    assert all(texts.values())


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="builtin", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token  # greedy


def test_stop_strings_never_show(client):
    asked = {"model": "builtin", "messages": HELLO, "max_tokens": 60, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = text[20:24]
    answer = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == text[: text.index(stop)]
    streamed = client.chat.completions.create(**asked, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == answer.message.content


def test_completions_of_text_and_tokens(client, server):
    tokens = server.post("/tokenize", {"prompt": "Once upon a time"}).json()["tokens"]
    asked = {"model": "builtin", "max_tokens": 6, "temperature": 0}
    by_text = client.completions.create(prompt="Once upon a time", **asked)
    by_tokens = client.completions.create(prompt=tokens, **asked)
    both = client.completions.create(prompt=["Once upon a time", "The"], **asked)
    lists = client.completions.create(prompt=[tokens, tokens], **asked)
    assert by_text.choices[0].text == by_tokens.choices[0].text == both.choices[0].text
    assert [choice.text for choice in lists.choices] == [by_text.choices[0].text] * 2
    assert [choice.index for choice in both.choices] == [0, 1]
    assert by_text.usage.prompt_tokens == len(tokens)


def test_a_completion_is_sixteen_tokens_long_unless_asked(client):
    answer = client.completions.create(model="builtin", prompt="Once", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_completion_streams_and_echo(client):
    asked = {"model": "builtin", "prompt": "Once upon", "max_tokens": 6, "temperature": 0, "echo": True}
    whole = client.completions.create(**asked).choices[0].text
    assert whole.startswith("Once upon")
    assert (
        "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole
    )


def test_a_prompt_can_be_scored_without_an_answer(client):
    answer = client.completions.create(
        model="builtin", prompt="Once upon a time", max_tokens=0, echo=True, logprobs=1
    )
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text == "Once upon a time"
    assert len(scores.tokens) == answer.usage.prompt_tokens
    assert scores.token_logprobs[0] is None
    assert all(score <= 0 for score in scores.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_best_of_answers_the_likeliest(client):
    answer = client.completions.create(
        model="builtin", prompt="Once", max_tokens=8, n=1, best_of=4, seed=3, temperature=1.5, logprobs=0
    )
    every = client.completions.create(
        model="builtin", prompt="Once", max_tokens=8, n=4, seed=3, temperature=1.5, logprobs=0
    )
    assert len(answer.choices) == 1
    assert answer.choices[0].text in [choice.text for choice in every.choices]
    assert answer.usage.completion_tokens == every.usage.completion_tokens


def test_vllms_fields_pass_through_extra_body(client):
    answer = client.chat.completions.create(
        model="builtin",
        messages=[*HELLO, {"role": "assistant", "content": "There was"}],
        max_tokens=4,
        extra_body={
            "top_k": 1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 2,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "bad_words": ["dragon"],
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "cache_salt": "mine",
            "priority": 1,
        },
    )
    extra = answer.model_extra
    assert len(extra["prompt_token_ids"]) == len(extra["prompt_logprobs"]) == answer.usage.prompt_tokens
    assert len(answer.choices[0].model_extra["token_ids"]) == 4


def test_openais_other_fields_are_taken(client):
    client.chat.completions.create(
        model="builtin",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
        ],
        max_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"5": -100},
        top_p=0.9,
        user="ann",
        metadata={"trace": "1"},
        service_tier="flex",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        tool_choice="none",
    )


def test_errors_come_as_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="builtin", messages=HELLO, functions=[{"name": "f"}])
    assert error.value.param == "functions"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="builtin", messages=HELLO, max_tokens=10**6)
    assert error.value.code == "context_length_exceeded"


def test_the_async_client_and_many_at_once(aclient):
    async def ask(i):
        asked = {"model": "builtin", "messages": HELLO, "max_tokens": 10, "seed": i}
        if i % 2:
            return (await aclient.chat.completions.create(**asked)).choices[0].message.content
        stream = await aclient.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run():
        together = await asyncio.gather(*[ask(i) for i in range(8)])
        return together, [await ask(i) for i in range(8)]

    together, alone = asyncio.run(run())
    assert all(together)
    assert together == alone
