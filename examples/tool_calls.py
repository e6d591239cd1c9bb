"""A tool call and an answer with its result, through the official OpenAI client.

pip install openai
python examples/tool_calls.py [BASE_URL]

The built-in model calls a function only where `tool_choice` demands it: a grammar then writes the call. Models that
know tools decide by themselves with `tool_choice="auto"`.
"""

import json
import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str, days: int) -> str:
    """What the function returns."""
    return f"In {city} it is sunny for {days} days."


messages = [{"role": "user", "content": "Is it warm in Oslo?"}]
asked = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=1
)
message = asked.choices[0].message
call = message.tool_calls[0]
arguments = json.loads(call.function.arguments)
print("call:", call.function.name, arguments)

result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)}
answer = client.chat.completions.create(
    model=model, messages=[*messages, message, result], temperature=0, max_tokens=40
)
print("answer:", answer.choices[0].message.content)
