"""OpenAI's endpoints: chat completions, completions, tokenize.

- `routes`: the routes. `chat_wire`, `completions_wire`, `tokens_wire`: request bodies.
- `chat`, `completions`: prompts in, responses out.
- `tool_use`: tools and reasoning of a conversation. `template_switches`: variables of the chat template.
"""
