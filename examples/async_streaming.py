"""Several streams at once from asyncio, and one that is cancelled.

python examples/async_streaming.py [MODEL]
"""

import asyncio
import sys

from headrace import AsyncLLM, SamplingParams

PROMPTS = ["Once upon a time", "There was once a fox", "One day, a queen"]


async def tell(llm: AsyncLLM, prompt: str) -> None:
    """Print a completion when it is whole; its tokens arrive one by one."""
    params = SamplingParams(temperature=0.7, max_tokens=40, seed=1)
    text, deltas = "", 0
    async for delta in llm.stream(prompt, params):
        text += delta.text
        deltas += 1
    print(f"{prompt}{text}  [{deltas} deltas]")


async def main() -> None:
    """Run three streams, then cancel a fourth after five tokens."""
    async with AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else "builtin", max_num_seqs=16) as llm:
        await asyncio.gather(*(tell(llm, prompt) for prompt in PROMPTS))
        stream = llm.stream("Tell me a long story", SamplingParams(max_tokens=500, ignore_eos=True))
        tokens = 0
        async for delta in stream:
            tokens += len(delta.token_ids)
            if tokens >= 5:
                break  # leaving the loop ends the request, as does cancelling the task
        await stream.aclose()
        print(f"cancelled after {tokens} tokens")


asyncio.run(main())
