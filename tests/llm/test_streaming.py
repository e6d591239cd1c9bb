"""Streams of `LLM`: deltas add up to the output, leaving the loop ends the requests, and streams may interleave."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from headrace import LLM, CompletionDelta, SamplingParams
from headrace.config import ConfigError
from headrace.core.queueing.order import ByPriority
from headrace.core.request import InvalidParameter

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Once upon a time", "There was once a fox"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", max_num_seqs=8, kv_cache_memory_bytes=64 << 20, max_model_len=1024, dtype="float32")


def joined(deltas: list[CompletionDelta]) -> dict[tuple[int, int], tuple[str, list[int], str | None]]:
    """Text, tokens and finish reason of each completion, from its deltas."""
    found: dict[tuple[int, int], tuple[str, list[int], str | None]] = {}
    for delta in deltas:
        text, tokens, reason = found.get((delta.prompt_index, delta.index), ("", [], None))
        assert reason is None, "a delta after the last one"
        found[delta.prompt_index, delta.index] = (
            text + delta.text,
            [*tokens, *delta.token_ids],
            delta.finish_reason,
        )
    return found


def test_deltas_add_up_to_what_generate_returns(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=1)
    outputs = llm.generate(PROMPTS, params, n=2, progress=False)
    deltas = list(llm.stream(PROMPTS, params, n=2))
    assert len(deltas) > 12
    assert joined(deltas) == {
        (i, answer.index): (answer.text, answer.token_ids, answer.finish_reason)
        for i, output in enumerate(outputs)
        for answer in output.outputs
    }
    last = [delta for delta in deltas if delta.finish_reason]
    assert all(len(delta.output.outputs[delta.index].logprobs) == 12 for delta in last)
    assert sum(len(delta.logprobs) for delta in deltas) == 4 * 12


def test_a_stop_string_is_never_shown_in_part(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[:1], replace(GREEDY, max_tokens=60), progress=False)
    word = whole.outputs[0].text.split()[4]
    deltas = list(llm.stream(PROMPTS[:1], replace(GREEDY, max_tokens=60, stop=(word,))))
    text = "".join(delta.text for delta in deltas)
    assert text == whole.outputs[0].text[: whole.outputs[0].text.index(word)]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].output.outputs[0].stop_reason == word


def test_a_chat_is_streamed(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Tell me a story."}]
    (output,) = llm.chat(conversation, GREEDY, progress=False)
    deltas = list(llm.stream_chat(conversation, GREEDY))
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text


def test_leaving_the_loop_ends_the_requests(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, replace(GREEDY, max_tokens=500))
    next(stream)
    stream.close()
    assert llm._shared.jobs == {}
    llm.generate("a", GREEDY, progress=False)
    assert llm.loaded.engine.wake_at(0.0) is None
    llm.loaded.engine.check_consistency()


def test_streams_and_calls_interleave(llm: LLM) -> None:
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, progress=False)]
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    texts = [next(first).text, next(second).text]
    (between,) = llm.generate(PROMPTS[0], GREEDY, progress=False)
    texts[1] += "".join(delta.text for delta in second)
    texts[0] += "".join(delta.text for delta in first)
    assert texts == expected
    assert between.outputs[0].text == expected[0]
    assert llm._shared.jobs == {}


def test_a_bad_prompt_is_refused_by_the_call(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="the prompt is empty"):
        llm.stream([[]], GREEDY)


def test_an_interrupt_ends_the_stream_after_its_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    step = llm.loaded.engine.step

    def interrupted(now: float) -> list:
        os.kill(os.getpid(), signal.SIGINT)
        return step(now)

    monkeypatch.setattr(llm.loaded.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (output,) = llm.generate(PROMPTS[0], GREEDY, progress=False)
    assert len(output.outputs[0].token_ids) == 12
    llm.loaded.engine.check_consistency()


def test_the_end_of_the_block_closes_it() -> None:
    with LLM("builtin", max_num_seqs=1, kv_cache_memory_bytes="8MiB", max_model_len=256) as llm:
        stream = llm.stream("a", GREEDY)
        next(stream)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("a", GREEDY, progress=False)


def test_a_policy_may_be_given_as_a_class() -> None:
    with LLM(
        "builtin", kv_cache_memory_bytes=8 << 20, max_model_len=256, max_num_seqs=1, queue_order=ByPriority
    ) as llm:
        assert type(llm.loaded.engine.scheduler._order) is ByPriority


def test_options_of_the_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="port is an option of headrace serve"):
        LLM("builtin", port=8000)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM("builtin", max_num_seq=8)  # type: ignore[call-arg]
