"""LangChain's OpenAI chat model, unchanged."""

import asyncio

import pytest

langchain_openai = pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def chat(server):
    return langchain_openai.ChatOpenAI(
        model="builtin",
        base_url=server.url + "/v1",
        api_key="none",
        max_tokens=10,
        temperature=0,
        max_retries=0,
    )


def test_invoke(chat):
    message = chat.invoke([("system", "Be brief."), ("human", "Tell me a story about Anna.")])
    assert message.content
    assert message.usage_metadata["output_tokens"] <= 10
    assert message.response_metadata["finish_reason"] in ("stop", "length")


def test_stream_joins_up_to_the_whole(chat):
    question = "Tell me a story about Anna."
    chunks = list(chat.stream(question))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == chat.invoke(question).content


def test_async_batch(chat):
    answers = asyncio.run(chat.abatch(["Tell me a story.", "Write a list of three animals."]))
    assert all(answer.content for answer in answers)


def test_a_conversation_goes_back_and_forth(chat):
    first = chat.invoke("Tell me a story about Anna.")
    assert chat.invoke([("human", "Tell me a story about Anna."), first, ("human", "Go on.")]).content
