from __future__ import annotations

import itertools
import json
from typing import Any

from headrace.api.batch.job import in_job_order
from headrace.api.batch.lines import read_lines

DOCUMENTS = [letter * 200 for letter in "abc"]


def raw(name: str, **body: Any) -> bytes:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode()


def order(lines: list[bytes], **given: Any) -> list[str]:
    return [line.key for line in in_job_order(read_lines(lines), **given)]


def test_questions_about_one_document_follow_each_other():
    lines = [
        raw(f"{i % 3}-{i}", prompt=DOCUMENTS[i % 3] + f" question {i}?", max_tokens=9) for i in range(12)
    ]
    documents = [name[0] for name in order(lines)]
    assert sorted(order(lines)) == sorted(f"{i % 3}-{i}" for i in range(12))
    assert sum(a != b for a, b in itertools.pairwise(documents)) == 2


def test_chats_are_ordered_by_their_tools_and_messages():
    lines = [
        raw(
            f"{i % 2}-{i}",
            tools=[{"type": "function", "function": {"name": f"tool{i % 2}", "description": "x" * 100}}],
            messages=[{"role": "user", "content": f"{i}"}],
        )
        for i in range(6)
    ]
    assert [name[0] for name in order(lines)] in (["0"] * 3 + ["1"] * 3, ["1"] * 3 + ["0"] * 3)


def test_long_answers_to_short_prompts_go_first():
    lines = [
        raw("short", prompt="x" * 300, max_tokens=2),
        raw("long", prompt="y" * 300, max_tokens=2000),
        raw("open", prompt="z" * 300),
    ]
    assert order(lines) == ["open", "long", "short"]


def test_bad_lines_and_half_characters_come_through():
    lines = [
        b"{",
        raw("half", prompt="\ud800"),
        raw("tokens", prompt=[1, 2, 3]),
        raw("odd", max_tokens="many"),
    ]
    assert sorted(order(lines)) == ["batch_req_1", "half", "odd", "tokens"]


def test_a_batch_larger_than_the_window_is_read_as_it_is_needed():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield raw(f"r{taken}", prompt=DOCUMENTS[taken % 3])

    ordered = in_job_order(read_lines(endless()), window_bytes=2000)
    first = [next(ordered).key for _ in range(9)]
    assert taken < 20
    assert sorted(first, key=lambda name: int(name[1:]))[0] == "r1"
