"""Load a LoRA adapter into a running server, ask it and the model itself, and unload it.

headrace serve MODEL --enable-lora
python examples/lora.py FOLDER [BASE_URL]
"""

import sys
from pathlib import Path

import httpx
from openai import OpenAI

folder = Path(sys.argv[1]).resolve()
server = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{server}/v1", api_key="none")
base = client.models.list().data[0].id


def change(route: str, **body: object) -> None:
    """Load or unload an adapter; prints what the server says."""
    answer = httpx.post(f"{server}/v1/{route}", json=body, timeout=60)
    print(answer.text)
    answer.raise_for_status()


change("load_lora_adapter", lora_name="adapter", lora_path=str(folder))
try:
    for model in (base, "adapter"):
        answer = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=20, temperature=0
        )
        print(f"{answer.model}: {answer.choices[0].text!r}")
finally:
    change("unload_lora_adapter", lora_name="adapter")
