"""`LLM` called by several threads: answers are those of one thread, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.core.request import InvalidParameter
from tests.doubles.tiny_encoder import write_cross_encoder, write_embedding_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "There was once a fox", "Hello there", "A king had three sons"]
HELLO = [{"role": "user", "content": "Hello!"}]
SECONDS = 60
GIVEN: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20, "max_model_len": 512}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", **GIVEN, dtype="float32") as llm:
        yield llm


def text(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, params, progress=False)[0].outputs[0].text


def streamed(llm: LLM, prompt: str) -> str:
    return "".join(delta.text for delta in llm.stream(prompt, GREEDY))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls, each on a thread of its own; an exception is a result too."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(SECONDS)
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(SECONDS) for each in [pool.submit(run, call) for call in calls]]


def is_idle(llm: LLM) -> bool:
    llm.loaded.engine.check_consistency()
    return llm._shared.jobs == {} and llm.loaded.engine.scheduler.num_running == 0


def test_four_threads_have_the_answers_of_one(llm: LLM) -> None:
    expected = [text(llm, prompt) for prompt in PROMPTS]
    for _ in range(3):
        found = at_once(*(lambda prompt=prompt: text(llm, prompt) for prompt in PROMPTS))
        assert found == expected
    assert is_idle(llm)


def test_calls_of_threads_run_in_the_same_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = llm.loaded.engine.step, []
    monkeypatch.setattr(llm.loaded.engine, "step", lambda now: steps.append(1) or step(now))
    text(llm, PROMPTS[0], replace(GREEDY, max_tokens=100))
    alone = len(steps)
    steps.clear()
    at_once(*[lambda: text(llm, PROMPTS[0], replace(GREEDY, max_tokens=100))] * 4)
    assert len(steps) < 2 * alone


def test_threads_of_asyncio(llm: LLM) -> None:
    async def main() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(text, llm, prompt) for prompt in PROMPTS))

    assert asyncio.run(main()) == [text(llm, prompt) for prompt in PROMPTS]


def test_streams_of_threads_have_every_delta(llm: LLM) -> None:
    expected = [text(llm, prompt) for prompt in PROMPTS]
    for _ in range(3):
        calls = [lambda prompt=prompt: streamed(llm, prompt) for prompt in PROMPTS]
        assert at_once(*calls, lambda: text(llm, PROMPTS[0])) == [*expected, expected[0]]
    assert is_idle(llm)


def test_a_stream_that_pauses_stops_nobody(llm: LLM) -> None:
    expected = text(llm, PROMPTS[0])
    stream = llm.stream(PROMPTS[0], GREEDY)
    parts = [next(stream).text]
    assert at_once(lambda: text(llm, PROMPTS[0]), lambda: streamed(llm, PROMPTS[0])) == [expected] * 2
    assert "".join(parts + [delta.text for delta in stream]) == expected


def test_calls_of_all_kinds_at_once(tmp_path: Path) -> None:
    given = {
        "embedding_model": "builtin",
        "rerank_model": str(write_cross_encoder(tmp_path / "cross")),
        "dtype": "float32",
    }
    with LLM("builtin", **GIVEN, **given) as llm:
        calls = [
            lambda: text(llm, PROMPTS[0]),
            lambda: llm.chat(HELLO, GREEDY, progress=False)[0].outputs[0].text,
            lambda: [each.embedding for each in llm.embed(PROMPTS, progress=False)],
            lambda: [each.score for each in llm.score("a b", ["c", "d e"], progress=False)],
            lambda: streamed(llm, PROMPTS[1]),
        ]
        expected = [call() for call in calls]
        for _ in range(3):
            for found, right in zip(at_once(*calls), expected, strict=True):
                if isinstance(right, str):
                    assert found == right
                else:
                    np.testing.assert_allclose(found, right, atol=1e-5)
        assert is_idle(llm)


def test_embeddings_alone(tmp_path: Path) -> None:
    with LLM(str(write_embedding_model(tmp_path))) as llm:
        expected = [each.embedding for each in llm.embed(["a b", "c"], progress=False)]
        for found in at_once(*[lambda: llm.embed(["a b", "c"], progress=False)] * 4):
            np.testing.assert_allclose([each.embedding for each in found], expected, atol=1e-5)


def test_an_exception_of_one_is_not_the_others(llm: LLM) -> None:
    def leaves() -> None:
        for _ in llm.stream(PROMPTS[1], GREEDY):
            raise ZeroDivisionError

    def refused() -> None:
        llm.generate([[-1]], GREEDY, progress=False)

    expected = text(llm, PROMPTS[0])
    found = at_once(leaves, refused, lambda: text(llm, PROMPTS[0]), lambda: streamed(llm, PROMPTS[0]))
    assert [type(each) for each in found[:2]] == [ZeroDivisionError, InvalidParameter]
    assert found[2:] == [expected] * 2
    assert is_idle(llm)


def test_a_failed_step_ends_every_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, calls = llm.loaded.decoder.greedy, []

    def fails_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 40:
            raise RuntimeError("out of memory")
        return greedy(*given)

    monkeypatch.setattr(llm.loaded.decoder, "greedy", fails_once)
    long = replace(GREEDY, max_tokens=200)
    for found in at_once(
        *[lambda: llm.generate(PROMPTS[0], long, progress=False)[0].outputs[0]] * 3,
        lambda: list(llm.stream(PROMPTS[0], long))[-1].output.outputs[0],
    ):
        if isinstance(found, BaseException):
            assert str(found) == "out of memory"
        elif found.finish_reason == "failed":
            assert found.error == "out of memory"
        else:
            assert len(found.token_ids) == 200
    assert len(calls) >= 40
    monkeypatch.undo()
    assert text(llm, PROMPTS[0])
    assert is_idle(llm)


def test_closing_ends_the_calls_of_other_threads() -> None:
    llm = LLM("builtin", **GIVEN)
    running = threading.Event()

    def runs() -> None:
        for _ in llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=480)):
            running.set()

    def closes() -> None:
        running.wait(SECONDS)
        llm.close()

    def waits() -> str:
        return text(llm, PROMPTS[1], replace(GREEDY, max_tokens=480))

    *ended, closed, again = at_once(runs, waits, waits, closes, closes)
    assert (closed, again) == (None, None)
    assert [str(each) for each in ended] == ["this LLM is closed"] * 3


def test_an_interrupt_reaches_a_call_that_waits_for_another_thread(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, held, waited = llm.loaded.engine.step, threading.Event(), threading.Event()

    def slow(now: float) -> Any:
        held.set()
        if threading.current_thread() is not threading.main_thread():
            waited.wait(SECONDS)
        return step(now)

    monkeypatch.setattr(llm.loaded.engine, "step", slow)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(text, llm, PROMPTS[0])
        assert held.wait(SECONDS)

        def interrupt() -> None:
            while len(llm._turns._waiting) < 1:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            text(llm, PROMPTS[1])
        waited.set()
        assert other.result(SECONDS) == text(llm, PROMPTS[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert is_idle(llm)


@pytest.mark.parametrize("call", ["generate", "embed", "close"])
def test_a_call_from_inside_a_step_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def nested(now: float) -> Any:
        return getattr(llm, call)(*([] if call == "close" else ["a"]))

    monkeypatch.setattr(llm.loaded.engine, "step", nested)
    with pytest.raises(RuntimeError, match="from inside one of its own steps"):
        text(llm, PROMPTS[0])
    monkeypatch.undo()
    assert text(llm, PROMPTS[0])
    assert is_idle(llm)


def test_a_stream_may_be_consumed_by_other_calls(llm: LLM) -> None:
    expected = text(llm, PROMPTS[0])
    parts = []
    for delta in llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=3)):
        parts.append(text(llm, PROMPTS[0]))
        assert delta.text is not None
    assert parts == [expected] * len(parts)
    assert parts


def test_made_by_one_thread_and_used_by_another() -> None:
    with ThreadPoolExecutor(1) as pool:
        llm = pool.submit(LLM, "builtin", **GIVEN).result(SECONDS)
    with llm:
        assert text(llm, PROMPTS[0])


def test_no_two_answers_of_threads_have_the_same_seed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found = at_once(*[lambda: text(llm, PROMPTS[0], params)] * 8)
    assert len(set(found)) == 8


def test_a_forked_child_is_told(llm: LLM) -> None:
    text(llm, PROMPTS[0])
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            text(llm, PROMPTS[0])
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        llm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writer)
    assert b"does not work after a fork" in os.read(reader, 1000)
    os.close(reader)
    assert text(llm, PROMPTS[0])


def test_two_event_loops_at_once() -> None:
    llm = AsyncLLM("builtin", **GIVEN)
    mine, theirs = threading.Event(), threading.Event()

    def first() -> str:
        async def main() -> str:
            [output] = await llm.generate(PROMPTS[0], GREEDY)
            mine.set()
            await asyncio.to_thread(theirs.wait, SECONDS)
            await llm.close()
            return output.outputs[0].text

        return asyncio.run(main())

    def second() -> None:
        mine.wait(SECONDS)
        try:
            asyncio.run(llm.generate(PROMPTS[0], GREEDY))
        finally:
            theirs.set()

    answer, error = at_once(first, second)
    assert isinstance(answer, str)
    assert "another event loop" in str(error)
