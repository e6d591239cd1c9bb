"""`AsyncLLM`: the outputs of `LLM`, concurrent tasks, abort by cancellation, and an orderly end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.core.events import Finished
from headrace.core.request import InvalidParameter

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
PROMPTS = ["Once upon a time", "There was once a fox", "One day, a queen"]
CHAT = [{"role": "user", "content": "Hello!"}]
GIVEN = {"max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024, "dtype": "float32"}


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM("builtin", **GIVEN) as llm:
        yield llm


def run(use):
    """What ``use`` returns for an engine of its own."""

    async def main():
        async with AsyncLLM("builtin", **GIVEN) as llm:
            result = await use(llm)
            await idle(llm)
            return result

    return asyncio.run(main())


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine has no request left, and check its books."""
    async with asyncio.timeout(60):
        while llm._service.open_requests():
            await asyncio.sleep(0.005)
    await llm._service.between_steps(llm.loaded.engine.check_consistency)


class Ends:
    """A watcher that collects why requests ended."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.reasons: list[str] = []
        llm._service.watch(self)

    def fold(self, event, now):
        if isinstance(event, Finished):
            self.reasons.append(str(event.reason))


def test_outputs_are_those_of_llm(offline: LLM) -> None:
    async def use(llm):
        return await llm.generate(PROMPTS, GREEDY, n=2), await llm.chat(CHAT, GREEDY)

    completions, chats = run(use)
    expected = offline.generate(PROMPTS, GREEDY, n=2, progress=False)
    assert [each.outputs for each in completions] == [each.outputs for each in expected]
    assert [each.prompt for each in completions] == PROMPTS
    assert chats[0].outputs == offline.chat(CHAT, GREEDY, progress=False)[0].outputs
    for output in completions:
        metrics = output.metrics
        assert 0 < metrics.arrived <= metrics.admitted <= metrics.first_token <= metrics.finished


def test_tokens_found_in_the_cache_are_counted() -> None:
    prompt = "Once upon a time there was a fox who lived by the river. " * 4

    async def use(llm):
        await llm.generate(prompt, GREEDY)
        (again,) = await llm.generate(prompt, GREEDY)
        return again

    again = run(use)
    assert again.metrics.cached_tokens == len(again.prompt_token_ids) - 1


def test_concurrent_streams_add_up(offline: LLM) -> None:
    async def use(llm):
        async def text(prompt):
            return "".join([delta.text async for delta in llm.stream(prompt, GREEDY)])

        return await asyncio.gather(*map(text, PROMPTS))

    expected = offline.generate(PROMPTS, GREEDY, progress=False)
    assert run(use) == [output.outputs[0].text for output in expected]


def test_a_stop_string_ends_a_stream(offline: LLM) -> None:
    (whole,) = offline.generate(PROMPTS[0], replace(GREEDY, max_tokens=60), progress=False)
    word = whole.outputs[0].text.split()[4]

    async def use(llm):
        return [delta async for delta in llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=60, stop=(word,)))]

    deltas = run(use)
    text = whole.outputs[0].text
    assert "".join(delta.text for delta in deltas) == text[: text.index(word)]
    assert (deltas[-1].finish_reason, deltas[-1].output.outputs[0].stop_reason) == ("stop", word)


def test_a_cancelled_task_ends_its_requests() -> None:
    async def use(llm):
        ends = Ends(llm)
        task = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
        while not llm._service.open_requests():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        (other,) = await llm.generate(PROMPTS[1], GREEDY)
        await idle(llm)
        return other, ends.reasons

    other, reasons = run(use)
    assert len(other.outputs[0].token_ids) == 12
    assert reasons == ["cancelled", "length"]


def test_leaving_the_loop_ends_the_requests() -> None:
    async def use(llm):
        ends = Ends(llm)
        stream = llm.stream(PROMPTS[0], LONG)
        async for delta in stream:
            assert delta.finish_reason is None
            break
        await stream.aclose()
        await idle(llm)
        return delta.output.outputs[0], ends.reasons

    answer, reasons = run(use)
    assert 0 < len(answer.token_ids) < 900
    assert reasons == ["cancelled"]


def test_closing_ends_what_is_open() -> None:
    async def main():
        llm = AsyncLLM("builtin", **GIVEN)
        task = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
        while not llm._service.open_requests():
            await asyncio.sleep(0)
        await llm.close()
        await llm.close()
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
            await llm.generate("a", GREEDY)
        return await asyncio.wait_for(task, 60)

    (output,) = asyncio.run(main())
    assert output.outputs[0].finish_reason == "cancelled"


def test_a_bad_prompt_is_refused_by_the_call() -> None:
    async def use(llm):
        with pytest.raises(InvalidParameter, match="the prompt is empty"):
            llm.stream([[]], GREEDY)
        with pytest.raises(InvalidParameter, match="n must be"):
            await llm.generate("a", GREEDY, n=0)
        return await llm.generate([], GREEDY)

    assert run(use) == []


def test_another_loop_is_refused() -> None:
    llm = AsyncLLM("builtin", **GIVEN)

    async def first():
        await llm.generate("a", GREEDY)

    async def second():
        with pytest.raises(RuntimeError, match="another event loop"):
            await llm.generate("a", GREEDY)

    asyncio.run(first())
    asyncio.run(second())
    asyncio.run(llm.close())


def test_a_program_that_closes_nothing_ends_well() -> None:
    """Its step is still in torch when the interpreter ends."""
    program = """
import asyncio
from headrace import AsyncLLM
from tests.llm.test_asynchronous import GIVEN, LONG

async def main():
    llm = AsyncLLM("builtin", **GIVEN)
    async for _ in llm.stream("Once", LONG):
        return llm

llm = asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "terminate called" not in ended.stderr
