"""LangChain's OpenAI chat model, unchanged."""

import asyncio
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from tests.api.tool_scenes import TOOL_TEMPLATE, WEATHER
from tests.doubles.scripted_model import scripted_server

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")


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


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "hen"]
    age: Annotated[int, Field(ge=0, le=20)]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_structured_output_by_a_schema(server, responses):
    chat = langchain_openai.ChatOpenAI(
        model="builtin",
        base_url=server.url + "/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=responses,
    )
    bound = chat.with_structured_output(Animal, method="json_schema")
    assert isinstance(bound.invoke("Tell me about an animal."), Animal)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_loop(responses, stream):
    def said(prompt):
        return "It is warm." if "21 degrees" in prompt else CALL

    with scripted_server(said, template=TOOL_TEMPLATE) as running:
        chat = langchain_openai.ChatOpenAI(
            model="fox",
            base_url=running.url,
            api_key="none",
            max_retries=0,
            use_responses_api=responses,
        ).bind_tools([WEATHER])
        question = messages.HumanMessage("Is it warm in Paris?")
        if stream:
            first, *rest = chat.stream([question])
            for chunk in rest:
                first += chunk
        else:
            first = chat.invoke([question])
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
        result = messages.ToolMessage("21 degrees", tool_call_id=call["id"])
        assert chat.invoke([question, first, result]).text == "It is warm."
