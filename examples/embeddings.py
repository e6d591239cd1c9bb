"""Search by meaning: embed documents and a question with the official OpenAI client, then order them with /v1/rerank.

pip install openai
headrace serve --embedding-model builtin      # or a real model: all-MiniLM-L6-v2, Qwen/Qwen3-Embedding-0.6B
python examples/embeddings.py [BASE_URL]
"""

import sys

import httpx
from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[-1].id  # the embedding model is listed after the one that generates

DOCUMENTS = ["Foxes are wild animals.", "A bank keeps money.", "Dogs like to run and play."]
QUESTION = "Which animals live in the wild?"

answer = client.embeddings.create(model=model, input=[QUESTION, *DOCUMENTS])
question, *documents = (item.embedding for item in answer.data)
scores = [sum(a * b for a, b in zip(question, document, strict=True)) for document in documents]
best = max(range(len(scores)), key=lambda index: scores[index])
print(f"dimensions: {len(question)}, tokens: {answer.usage.total_tokens}")
print("nearest:", DOCUMENTS[best])

ranked = httpx.post(
    base_url + "/rerank", json={"query": QUESTION, "documents": DOCUMENTS, "top_n": 2}, timeout=60
)
for result in ranked.json()["results"]:
    print(f"{result['relevance_score']:.3f}  {result['document']['text']}")
