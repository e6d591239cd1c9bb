"""An answer as a typed value, and one from a list of choices, through the official OpenAI client.

pip install openai
python examples/structured_output.py [BASE_URL]
"""

import sys

from openai import OpenAI
from pydantic import BaseModel, Field

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id


class Person(BaseModel):
    """What the answer must be."""

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)


answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Invent a person."}],
    response_format=Person,
    max_tokens=200,
    seed=1,
)
print("parsed:", answer.choices[0].message.parsed)

choice = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is the sky blue?"}],
    max_tokens=10,
    extra_body={"structured_outputs": {"choice": ["yes", "no"]}},  # spelt as in vLLM
)
print("choice:", choice.choices[0].message.content)
