"""One request after the other, with a peer's own speculative decoding, behind `benchmarks.peers.front`.

``python -m benchmarks.peers.serve_alone {openvino,transformers} FOLDER PORT OPTIONS``; OpenVINO's in its environment.
Options as JSON: ``threads``, ``method`` (``none``, ``lookup`` or ``draft``), ``draft`` (the folder of the draft model)
and ``tokens`` (drafted at a time). Both peers are used as their documentation shows it for one request at a time.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.front import Stream, serve

Generate = Callable[[Sequence[int], int], Sequence[int]]
"""The tokens that follow a prompt, exactly so many."""


class Alone:
    """A `front.Engine` that generates whole answers, one after the other, in a thread of its own."""

    def __init__(self, make: Callable[[], Generate]) -> None:
        self._came: queue.SimpleQueue[tuple[Sequence[int], int, Stream]] = queue.SimpleQueue()
        self._make = make
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        self._ready.wait()

    def submit(self, prompt: Sequence[int], max_tokens: int, stream: Stream) -> None:
        """See `front.Engine.submit`."""
        self._came.put((prompt, max_tokens, stream))

    def _run(self) -> None:
        generate = self._make()
        self._ready.set()
        while True:
            prompt, max_tokens, stream = self._came.get()
            try:
                stream.put(generate(prompt, max_tokens))
            except Exception:
                traceback.print_exc()
                os._exit(1)  # else its client would wait
            stream.end(len(prompt))


def transformers(folder: str, options: dict[str, Any]) -> Generate:
    """``generate`` with ``assistant_model`` or ``prompt_lookup_num_tokens``."""
    import torch
    import transformers as library

    torch.set_num_threads(options["threads"])
    library.logging.set_verbosity_error()
    loaded: Any = library.AutoModelForCausalLM
    model = loaded.from_pretrained(folder, dtype=torch.bfloat16).eval()
    more: dict[str, Any] = {}
    if options["method"] == "lookup":
        more["prompt_lookup_num_tokens"] = options["tokens"]
    elif options["method"] == "draft":
        more["assistant_model"] = loaded.from_pretrained(options["draft"], dtype=torch.bfloat16).eval()
    for each in (model, *([more["assistant_model"]] if options["method"] == "draft" else [])):
        each.generation_config = library.GenerationConfig(do_sample=False, pad_token_id=0)  # no token ends
    if options["method"] == "draft":
        more["assistant_model"].generation_config.num_assistant_tokens = options["tokens"]

    def generate(prompt: Sequence[int], count: int) -> Sequence[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **more)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generate


def openvino(folder: str, options: dict[str, Any]) -> Generate:
    """``LLMPipeline`` with ``draft_model`` or ``prompt_lookup``."""
    import numpy as np
    import openvino as library
    import openvino_genai

    plan = openvino_genai.SchedulerConfig()
    plan.cache_size = 1
    plan.enable_prefix_caching = False
    hints: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"], "INFERENCE_PRECISION_HINT": "bf16"}
    more: dict[str, Any] = {}
    if options["method"] == "lookup":
        more["prompt_lookup"] = True
    elif options["method"] == "draft":
        more["draft_model"] = openvino_genai.draft_model(options["draft"], "CPU", **hints)
    pipeline = openvino_genai.LLMPipeline(folder, "CPU", scheduler_config=plan, **more, **hints)

    def generate(prompt: Sequence[int], count: int) -> Sequence[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        if options["method"] != "none":
            config.num_assistant_tokens = options["tokens"]
        if options["method"] == "lookup":
            config.max_ngram_size = 3
        out = pipeline.generate(library.Tensor(np.array([prompt], dtype=np.int64)), config)
        tokens: list[int] = list(out.tokens[0])
        return tokens

    return generate


MAKERS = {"openvino": openvino, "transformers": transformers}

if __name__ == "__main__":
    peer, where, port, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    serve(Alone(lambda: MAKERS[peer](where, options)), peer, port)
