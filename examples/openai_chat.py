"""A streamed chat through the official OpenAI client.

pip install openai
python examples/openai_chat.py [BASE_URL]
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")  # any key will do where the server asks for none
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me a story about Anna."}],
    temperature=0.7,
    max_tokens=200,
    seed=1,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={
        "top_k": 20,
        "repetition_penalty": 1.05,
    },  # fields that OpenAI does not have, spelt as in vLLM
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(
            f"\n[{model}: {chunk.usage.prompt_tokens} prompt + {chunk.usage.completion_tokens} output tokens]"
        )
