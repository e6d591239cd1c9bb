"""LangChain's OpenAI chat model against Headrace, unchanged.

pip install langchain-openai
python examples/langchain_chat.py [BASE_URL]
"""

import sys

from langchain_openai import ChatOpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
chat = ChatOpenAI(model="builtin", base_url=base_url, api_key="none", max_tokens=60, seed=1)

message = chat.invoke([("system", "Be brief."), ("human", "Name three animals.")])
print(message.content)
print(message.usage_metadata)
for piece in chat.stream("Tell me a story about Anna."):
    print(piece.content, end="", flush=True)
print()
