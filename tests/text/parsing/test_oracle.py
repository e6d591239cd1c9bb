"""Transformers' response templates, where the library has one for a family, read the corpus as this parser does.

Theirs raises on broken calls and takes whole texts only, so it is asked for those that end well.
"""

from __future__ import annotations

import json

import pytest

from tests.text.parsing.corpus_files import SCHEMAS, cases, machine_for, read

chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schema}}}
    for name, schema in SCHEMAS.items()
]
END_OF_CALL = {"hermes": "</tool_call>", "qwen3_coder": "</tool_call>", "gemma4": "<tool_call|>"}
THINK = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"close_pattern": r"\s*<\|im_end\|>", "content": "text"}
TEMPLATES = {
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": CONTENT,
        },
    },
    "qwen3_coder": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": CONTENT,
        },
    },
    "gemma4": {
        "start_anchor": "<|turn>model\n",
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<\|tool_call>call:(?P<name>[\w.]+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"close": ["<turn|>"], "content": "text"},
        },
    },
}
KNOWN_ELSEWHERE = (
    "a marker in a string",
    "an end in a string",
    "the marker is missing",
    "JSON in place of elements",
)
"""Texts that theirs cuts at a marker inside of a string, or does not take for a call."""


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
def test_whole_calls_are_read_as_transformers_reads_them(name):
    compared = 0
    for case in cases(name):
        if not case.text.endswith(END_OF_CALL[name]) or not case.calls or case.note in KNOWN_ELSEWHERE:
            continue
        prefix = "<think>" if case.opened else ""
        try:
            theirs = chat_parsing.parse_response(case.text, TEMPLATES[name], prefix=prefix, tools=TOOLS)
        except ValueError:  # it reads no broken JSON
            continue
        content, reasoning, calls = read(machine_for(case), [case.text])
        functions = [call["function"] for call in theirs.get("tool_calls", [])]
        if not all(isinstance(each, dict) and isinstance(each.get("arguments"), dict) for each in functions):
            continue  # it takes any JSON for a call
        found = [(each["name"], each["arguments"]) for each in functions]
        assert [(called, json.loads(arguments)) for called, arguments in calls] == found, case
        assert theirs.get("content", "") == content, case
        if case.reasoning_format:
            assert theirs.get("reasoning_content", "") == reasoning, case
        compared += 1
    assert compared >= 20


def test_python_calls_are_read_as_transformers_reads_them():
    from transformers.utils.chat_parsing.content_parsers import parse_content

    compared = 0
    for case in cases("pythonic"):
        try:
            theirs = parse_content(case.text, "python-call-list", {})
        except ValueError:
            continue
        _, _, calls = read(machine_for(case), [case.text])
        if theirs and all(call["name"] in SCHEMAS for call in theirs):
            assert [(name, json.loads(arguments)) for name, arguments in calls] == [
                (call["name"], call["arguments"]) for call in theirs
            ], case
            compared += 1
    assert compared >= 15
