"""Examples of all request bodies and their parts, and what replaces values in them to break them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import headrace.api
from headrace.api.wire import Wire

for module in pkgutil.walk_packages(headrace.api.__path__, "headrace.api."):
    importlib.import_module(module.name)


def _forms(base: type[Wire]) -> Iterator[type[Wire]]:
    for form in base.__subclasses__():
        if form.__module__.startswith("headrace."):
            yield form
        yield from _forms(form)


FORMS = sorted(set(_forms(Wire)), key=lambda form: f"{form.__module__}.{form.__name__}")
"""Every class of a body or of a part of one."""

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTION = {"name": "f", "parameters": _SCHEMA}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
_HI = [{"role": "user", "content": "Hi"}]

SMALLEST: dict[str, dict[str, Any]] = {
    "LoadAdapterBody": {"lora_name": "a", "lora_path": "p"},
    "UnloadAdapterBody": {"lora_name": "a"},
    "AbortBody": {"request_id": "r"},
    "AllowedChoice": {"type": "allowed_tools", "allowed_tools": _ALLOWED},
    "AllowedTools": _ALLOWED,
    "AllowedFunctions": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    },
    "AnswerBlock": {"type": "text", "text": "x"},
    "AnswerContent": {"type": "output_text", "text": "x"},
    "AnswerItem": {"role": "assistant", "content": "x"},
    "AnswerMessage": {"role": "assistant"},
    "AnswerPart": {"type": "text", "text": "x"},
    "AnswerTurn": {"role": "assistant", "content": "x"},
    "AnyChoice": {"type": "auto"},
    "BatchBody": {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"},
    "CacheMark": {"type": "ephemeral"},
    "CalledFunction": {"name": "f", "arguments": "{}"},
    "CalledTool": {"id": "c", "function": {"name": "f", "arguments": "{}"}},
    "ChatBody": {"messages": _HI},
    "CompactBody": {"model": "m"},
    "CompactionItem": {"type": "compaction", "encrypted_content": "x"},
    "CompletionBody": {"prompt": "x"},
    "ContextManagement": {"type": "compaction"},
    "Conversation": {"messages": _HI},
    "CountBody": {"messages": _HI},
    "DetokenizeBody": {"tokens": [1]},
    "DirectCaller": {"type": "direct"},
    "EmbeddingBody": {"input": "x"},
    "ExperimentBody": {"setting": "s", "treatment": 1, "metric": "m"},
    "ExpiresAfter": {"anchor": "created_at", "seconds": 3600},
    "FeedbackBody": {"id": "r"},
    "Function": {"name": "f"},
    "FunctionCallItem": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    "FunctionCallOutputItem": {"type": "function_call_output", "call_id": "c", "output": "x"},
    "FunctionChoice": {"type": "function", "name": "f"},
    "FunctionName": {"name": "f"},
    "FunctionTool": {"type": "function", "name": "f"},
    "HostedTool": {"type": "web_search"},
    "EncodedImage": {"type": "base64", "media_type": "image/png", "data": "x"},
    "ImageBlock": {"type": "image", "source": {"type": "url", "url": "x"}},
    "ImageContent": {"type": "input_image", "image_url": "x"},
    "ImagePart": {"type": "image_url", "image_url": {"url": "x"}},
    "ImageUrl": {"url": "x"},
    "InputMessage": {"role": "user", "content": "x"},
    "ItemReference": {"id": "i"},
    "JsonObjectFormat": {"type": "json_object"},
    "JsonOutput": {"type": "json_schema", "schema": _SCHEMA},
    "JsonSchema": {"schema": _SCHEMA},
    "JsonSchemaFormat": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
    "LinkedImage": {"type": "url", "url": "x"},
    "Message": {"role": "user"},
    "MessageItem": {"role": "user", "content": "x"},
    "MessagesBody": {"messages": _HI, "max_tokens": 1},
    "NamedChoice": {"type": "function", "function": {"name": "f"}},
    "NamedToolChoice": {"type": "tool", "name": "f"},
    "NamespaceTool": {"type": "namespace", "name": "n", "tools": []},
    "Prediction": {"type": "content", "content": "x"},
    "ReasoningItem": {"type": "reasoning"},
    "ReasoningPart": {"type": "reasoning_text", "text": "x"},
    "RedactedThinkingBlock": {"type": "redacted_thinking", "data": "x"},
    "RerankBody": {"query": "x", "documents": ["x"]},
    "ResponsesBody": {"input": "x"},
    "RetentionBody": {"priority": 50},
    "ScenarioRequest": {"prompt_tokens": 1, "output_tokens": 1},
    "SchemaFormat": {"type": "json_schema", "schema": _SCHEMA},
    "SimulationBody": {"requests": [{"prompt_tokens": 1, "output_tokens": 1}]},
    "StructuralTagFormat": {"type": "structural_tag", "structures": [], "triggers": []},
    "TextBlock": {"type": "text", "text": "x"},
    "TextContent": {"type": "input_text", "text": "x"},
    "TextFormat": {"type": "text"},
    "TextPart": {"type": "text", "text": "x"},
    "Thinking": {"type": "enabled"},
    "ThinkingBlock": {"type": "thinking", "thinking": "x"},
    "TokenizeBody": {"prompt": "x"},
    "TokenizeChatBody": {"messages": _HI},
    "Tool": {"type": "function", "function": {"name": "f"}},
    "ToolBody": {"name": "f", "input_schema": _SCHEMA},
    "ToolResultBlock": {"type": "tool_result", "tool_use_id": "c"},
    "ToolUseBlock": {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    "TunerBody": {"mode": "advise"},
    "UploadForm": {"file": "x", "purpose": "batch"},
    "WarmRequest": {"url": "/v1/completions", "body": {}},
}
"""The smallest valid object of each form that has required fields."""

_GENERATION: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    "structured_outputs": {"choice": ["a"]},
    "guided_json": _SCHEMA,
    "stop": ["a"],
    "logit_bias": {"1": 2},
    "metadata": {"a": "b"},
    "slo": {"ttft_ms": 1},
    "retention": [{"start": 0, "end": 1, "priority": 3}],
    "stream_options": {"include_usage": True},
    "response_cache": {"tags": ["a"], "ttl": 3},
    "kv_transfer_params": {"remote_block_ids": []},
    "agent_hint": {"ttl_seconds": 3},
    "bad_words": ["a"],
}
LARGE: dict[str, dict[str, Any]] = {
    "ChatBody": _GENERATION
    | {
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [_CALL]},
            {"role": "tool", "content": "x", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
        "chat_template_kwargs": {"a": 1},
    },
    "CompletionBody": _GENERATION | {"prompt": ["a"]},
    "ResponsesBody": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"id": "i"},
        ],
        "tools": [
            {"type": "function", **_FUNCTION},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **_FUNCTION}]},
            {"type": "web_search", "x": 1},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        "reasoning": {"effort": "low"},
        "context_management": [{"type": "compaction"}],
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "client_metadata": {"a": "b"},
    },
    "MessagesBody": {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "citations": []}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "x"},
                    {
                        "type": "tool_use",
                        "id": "c",
                        "name": "f",
                        "input": {"a": 1},
                        "caller": {"type": "direct"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}
                ],
            },
        ],
        "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": _SCHEMA, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["a"],
    },
    "EmbeddingBody": {"input": ["x"], "encoding_format": "float"},
    "RerankBody": {"query": "x", "documents": ["x", {"text": "x"}]},
    "ScoreBody": {"text_1": ["x"], "text_2": "x"},
    "WarmBody": {
        "requests": [{"url": "/v1/completions", "body": {"prompt": "x"}}],
        "prefixes": [{"messages": _HI, "retention": 3}],
    },
    "ExperimentBody": {"setting": "s", "treatment": 1, "metric": "m", "guards": {"a": 1.0}},
    "BatchBody": SMALLEST["BatchBody"]
    | {"metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 3600}},
    "ClearBody": {"tags": ["a"]},
    "StructuredOutputs": {"json": _SCHEMA, "structural_tag": {}},
}
"""Bodies with many of their fields."""

ODD: tuple[Any, ...] = (
    *(None, True, 7, -1, 1.5, 2**70, "", "x", [], [[]], [None], [5], [{}], {}, {"x": 1}, {"": None}),
    *(
        {"type": "x"},
        {"type": 5},
        {"type": "text"},
        {"type": []},
        {"role": []},
        [{"type": {}}],
        [{"role": "assistant"}],
    ),
)
"""What replaces a value."""


def example(form: type[Wire]) -> dict[str, Any]:
    """The smallest valid object of ``form``."""
    return SMALLEST.get(form.__name__, {})


def broken(value: Any) -> Iterator[Any]:
    """``value`` with one value replaced, a key removed or a key added, at every place of it."""
    yield from ODD
    if isinstance(value, dict):
        for name, each in value.items():
            yield {other: it for other, it in value.items() if other != name}
            for replaced in broken(each):
                yield value | {name: replaced}
        yield value | {"zzz": 1}
    if isinstance(value, list):
        for at, each in enumerate(value):
            for replaced in broken(each):
                yield [*value[:at], replaced, *value[at + 1 :]]
