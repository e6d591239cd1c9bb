"""A chat template that knows tools and reasoning, and tools to offer."""

from __future__ import annotations

TOOL_TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %} {{ tool | tojson }}{% endfor %}"
    ' Call as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>{{ "\n" }}{% endif %}'
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}] "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or () %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% if m.role == 'tool' %} ({{ m.tool_call_id }}){% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}{% endif %}"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
