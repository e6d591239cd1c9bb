from __future__ import annotations

import pytest

from headrace.core.request import Request, SamplingParams
from headrace.observe.recording.fingerprints import STOP, Fingerprints, read, written


def request(name: str, *tokens: int, **more) -> Request:
    return Request(name, tokens, **more)


def common(left, right) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def test_fingerprints_are_equal_just_as_far_as_prefixes_are():
    prints = Fingerprints(b"key")
    first, _ = prints.begin(request("a", *range(50)))
    assert len(first) == len(set(first)) == 50
    for same in (0, 1, 7, 49):
        other, _ = prints.begin(request(f"b{same}", *range(same), 99, *range(same + 1, 50)))
        assert common(first, other) == same
        assert not set(first[same:]) & set(other[same:])


def test_other_salts_adapters_and_recordings_have_nothing_in_common():
    prints = Fingerprints(b"key")
    first, _ = prints.begin(request("a", 1, 2, 3))
    assert not set(first) & set(prints.begin(request("b", 1, 2, 3, salt="x"))[0])
    assert not set(first) & set(prints.begin(request("c", 1, 2, 3, adapter="x"))[0])
    assert not set(first) & set(Fingerprints(b"another").begin(request("a", 1, 2, 3))[0])


def test_a_later_prompt_continues_an_answer():
    prints = Fingerprints(b"key")
    prompt, brought = prints.begin(request("a", 1, 2, answered=(3,)))
    answer = brought + prints.answer("a", (4,)) + prints.answer("a", (5, 6))
    assert prints.begin(request("b", 1, 2, 3, 4, 5, 6, 7))[0][:6] == prompt + answer


def test_only_tokens_that_end_an_answer_get_the_stop_mark():
    prints = Fingerprints(b"key")
    ends = {"eos_token_ids": frozenset({7})}
    prints.begin(request("a", 7, params=SamplingParams(stop_token_ids=(9,)), **ends))
    assert STOP not in prints.answer("a", (1, 2))
    assert prints.answer("a", (9,)) == prints.answer("a", (7,)) == (STOP,)
    prints.begin(request("b", 1, params=SamplingParams(ignore_eos=True), **ends))
    assert STOP not in prints.answer("b", (7,))
    assert prints.begin(request("c", 7, answered=(1, 7), **ends))[1][-1] == STOP


def test_a_refused_twin_does_not_disturb_the_live_one():
    prints, alone = Fingerprints(b"key"), Fingerprints(b"key")
    for one in (prints, alone):
        one.begin(request("a", 1, 2))
    prints.begin(request("a", 8, 9))
    prints.end("a")
    assert prints.answer("a", (3,)) == alone.answer("a", (3,))
    prints.end("a")
    with pytest.raises(KeyError):
        prints.answer("a", (4,))


def test_text_and_back():
    assert read(written((1, 2, (1 << 24) - 1))) == (1, 2, (1 << 24) - 1)
    assert written(()) == ""
    for wrong in ("AAA", "AAAAA===", "AAAAAA==", "\u00e9"):
        with pytest.raises(ValueError):  # noqa: PT011 - base64's own error or ours
            read(wrong)
