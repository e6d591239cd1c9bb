"""Messages with reasoning and tool calls as JSON: whole, or the delta of a step."""

from __future__ import annotations

from typing import Any

from headrace.text.parsing.message import MessagePiece


def delta_of(piece: MessagePiece) -> dict[str, Any]:
    """The ``delta`` of a chunk. Reasoning has both field names that OpenAI-compatible servers use."""
    delta: dict[str, Any] = {}
    if piece.reasoning:
        delta |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
    if piece.content:
        delta["content"] = piece.content
    if piece.calls:
        delta["tool_calls"] = [
            {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is None
            else {
                "index": call.index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in piece.calls
        ]
    return delta


def message_of(pieces: list[MessagePiece], forced: bool = False) -> dict[str, Any]:
    """The ``message`` of a whole response; ``forced``: it has calls, or was cut off before the first."""
    content = "".join([piece.content for piece in pieces])
    reasoning = "".join([piece.reasoning for piece in pieces])
    calls: list[dict[str, Any]] = []
    for call in (call for piece in pieces for call in piece.calls):
        if call.name is not None:
            calls.append(
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            )
        calls[-1]["function"]["arguments"] += call.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    if not content and (reasoning or calls or forced):
        message["content"] = None
    return message
