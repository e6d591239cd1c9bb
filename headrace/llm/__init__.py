"""The engine in your own process: `LLM` for scripts, `AsyncLLM` for asyncio. Both return the same outputs.

```
from headrace import LLM, SamplingParams
with LLM("builtin") as llm:
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
        print(output.outputs[0].text)
```

Files in reading order:

- `outputs`: the results of a call, whole or as deltas
- `offline`: `LLM`, one engine for the calls of several threads, of which one computes; Ctrl-C and the progress bar
- `embedding`: embeddings and scores
- `asynchronous`: `AsyncLLM`
- `images`: images of conversations
- `job`: one call as requests of the engine, and its completions while they grow; LoRA adapters; options from keyword
  arguments
- `options`: their names and types, generated from the configuration
"""

from headrace.llm.asynchronous import AsyncLLM
from headrace.llm.job import LoRARequest
from headrace.llm.offline import LLM
from headrace.llm.options import LLMOptions
from headrace.llm.outputs import (
    CompletionDelta,
    CompletionOutput,
    EmbeddingOutput,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
)

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionDelta",
    "CompletionOutput",
    "EmbeddingOutput",
    "LLMOptions",
    "LoRARequest",
    "RequestMetrics",
    "RequestOutput",
    "ScoreOutput",
]
