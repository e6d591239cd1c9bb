"""The continuous batching of ``transformers`` behind `benchmarks.peers.front`.

``python -m benchmarks.peers.serve_transformers FOLDER PORT OPTIONS``, options as JSON: ``threads``, ``rows``,
``cache_bytes``, ``prefix_caching``, ``batched_tokens``, ``dtype``. Its manager computes in a thread of its own; another
hands out what it drew.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.peers.front import Stream, serve

PAGE_TOKENS = 32


class Manager:
    """A `front.Engine` over ``ContinuousBatchingManager``."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        loaded: Any = transformers.AutoModelForCausalLM
        model = loaded.from_pretrained(
            folder, dtype=getattr(torch, options["dtype"]), attn_implementation="sdpa"
        ).eval()
        config = model.config
        token_bytes = (
            2 * model.dtype.itemsize * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        )
        self._manager = model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=options["cache_bytes"] // (token_bytes * PAGE_TOKENS),
                max_batch_tokens=options["batched_tokens"],
                max_requests_per_batch=options["rows"],
                allow_block_sharing=options["prefix_caching"],
            ),
        )
        self._open: dict[str, tuple[int, Stream]] = {}
        self._sent: dict[str, int] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._manager.start()
        threading.Thread(target=self._hand_out, daemon=True).start()

    def submit(self, prompt: Sequence[int], max_tokens: int, stream: Stream) -> None:
        with self._lock:
            self._count += 1
            name = f"r{self._count}"
            self._open[name], self._sent[name] = (len(prompt), stream), 0
        self._manager.add_request(
            list(prompt), request_id=name, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )

    def _hand_out(self) -> None:
        while True:
            output = self._manager.get_result(timeout=1.0)
            if output is None:
                continue
            name = output.request_id
            prompt_tokens, stream = self._open[name]
            fresh = output.generated_tokens[self._sent[name] :]
            self._sent[name] += len(fresh)
            if fresh:
                stream.put(fresh)
            if output.is_finished():
                stream.end(prompt_tokens)
                del self._open[name], self._sent[name]


if __name__ == "__main__":
    serve(Manager(sys.argv[1], json.loads(sys.argv[3])), "transformers", int(sys.argv[2]))
