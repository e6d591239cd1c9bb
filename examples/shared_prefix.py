"""What a shared system prompt saves: each question after the first finds the prompt's blocks computed.

python examples/shared_prefix.py [BASE_URL]
"""

import sys
import time

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id

rules = "\n".join(f"Rule {number}: be kind, be brief, and speak of foxes." for number in range(60))
for question in ("Who are you?", "Tell me a joke.", "Name three animals."):
    began = time.perf_counter()
    first = None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": rules}, {"role": "user", "content": question}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - began
        if chunk.usage:
            usage = chunk.usage
    cached = usage.prompt_tokens_details.cached_tokens
    shown = "none" if first is None else f"{1000 * first:.0f} ms"
    print(f"{question:20} prompt {usage.prompt_tokens} tokens, cached_tokens={cached}, first token: {shown}")
