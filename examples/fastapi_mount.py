"""The OpenAI API under /llm of a FastAPI application, beside a route of its own that uses it.

pip install fastapi
python examples/fastapi_mount.py [PORT]
"""

import sys
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from openai import AsyncOpenAI

from headrace import build_app
from headrace.config import options

llm_app, llm_running = build_app(options({"model": "builtin", "max_num_seqs": 16}))


@asynccontextmanager
async def lifespan(app):
    """FastAPI does not start what is mounted: enter its context here."""
    async with llm_running:
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/llm", llm_app)

# The route below calls the mounted application in this process, without a socket.
client = AsyncOpenAI(
    base_url="http://llm/v1", api_key="none", http_client=AsyncClient(transport=ASGITransport(llm_app))
)


@app.get("/story")
async def story(about: str = "a fox") -> dict[str, str]:
    """A short story."""
    prompt = f"Once there was {about}"
    answer = await client.completions.create(model="builtin", prompt=prompt, max_tokens=30, temperature=0)
    return {"story": answer.choices[0].text}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
