"""OpenAI's endpoints: chat completions, completions, tokenize.

- `routes`: the routes. `chat_wire`, `completions_wire`, `tokens_wire`: request bodies.
- `chat`, `completions`: prompts in, responses out.
"""
