"""Headrace as a deployment of Ray Serve: streaming, autoscaling, and a router that keeps prefixes on their replicas.

    pip install 'ray[serve]>=2.60,<2.61' headrace
    python examples/ray_serve.py --replicas 2          # starts Ray on this machine, asks a few questions and ends
    serve run examples.ray_serve:app                   # the same deployment, until it is stopped

Ray's router for prefixes reads ``messages`` or ``prompt`` of the first argument; it is in Ray's LLM part, which needs
no vLLM for it. Ray Serve has no OpenAI API of its own here: `Chat` is called by a handle, or by HTTP with one JSON
object, and streams lines of text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import StreamingResponse

MODEL = "builtin"


class Question(NamedTuple):
    """What the router and the deployment read."""

    messages: list[dict[str, str]]
    max_tokens: int = 64


@serve.deployment(
    max_ongoing_requests=64,
    autoscaling_config=AutoscalingConfig(min_replicas=1, max_replicas=4, target_ongoing_requests=16),
    request_router_config=RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter),
    ray_actor_options={"num_cpus": 1},
    graceful_shutdown_timeout_s=40,
)
class Chat:
    """One replica: an engine in the replica's process."""

    def __init__(self, model: str) -> None:
        from headrace import AsyncLLM

        self._llm = AsyncLLM(model)

    async def answer(self, question: Question) -> AsyncIterator[dict[str, Any]]:
        """Yield the text as it comes, and at the end how much of the prompt was cached."""
        from headrace import SamplingParams

        params = SamplingParams(max_tokens=question.max_tokens, temperature=0.0)
        async for delta in self._llm.stream_chat(question.messages, params):
            yield {"text": delta.text}
            if delta.finish_reason is not None:
                usage = delta.output
                yield {
                    "finish_reason": delta.finish_reason,
                    "prompt_tokens": len(usage.prompt_token_ids),
                    "cached_tokens": usage.metrics.cached_tokens,
                    "replica": serve.get_replica_context().replica_id.unique_id,
                }

    async def __call__(self, request: Request) -> StreamingResponse:
        """The same over HTTP, one JSON object a line."""
        question = Question(**await request.json())

        async def lines() -> AsyncIterator[str]:
            async for part in self.answer(question):
                yield json.dumps(part) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def __del__(self) -> None:
        await self._llm.close()


app = Chat.bind(MODEL)


def main() -> None:
    """Ask questions of two prefixes, and print which replica answered from which cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--questions", type=int, default=4, help="for each prefix")
    args = parser.parse_args()
    deployment = Chat.options(autoscaling_config=None, num_replicas=args.replicas)
    handle = serve.run(deployment.bind(MODEL)).options(stream=True, method_name="answer")
    rules = {
        name: f"You are {name}. " + "Answer in short and friendly sentences. " * 30 for name in ("Ada", "Ben")
    }
    for number in range(args.questions):
        for name, system in rules.items():
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Question {number}: what is a headrace?"},
            ]
            parts = list(handle.remote(Question(messages, 16)))
            end = parts[-1]
            print(
                f"{name} {number}: replica {end['replica']}, {end['cached_tokens']} of {end['prompt_tokens']} prompt"
                f" tokens cached, {len(parts) - 1} parts"
            )
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
