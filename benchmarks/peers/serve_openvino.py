"""OpenVINO GenAI's continuous batching behind `benchmarks.peers.front`; runs in the peer's environment.

``python -m benchmarks.peers.serve_openvino FOLDER PORT OPTIONS``, options as JSON: ``threads``, ``rows``,
``cache_bytes``, ``prefix_caching``, ``batched_tokens``, ``compute`` and ``kv`` (precisions). One thread owns the
pipeline: it takes what came, steps, and reads every handle.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.front import Stream, serve


class Pipeline:
    """A `front.Engine` over ``ContinuousBatchingPipeline``."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        plan = openvino_genai.SchedulerConfig()
        plan.max_num_seqs = options["rows"]
        plan.max_num_batched_tokens = options["batched_tokens"]
        plan.cache_size = -(-options["cache_bytes"] // (1 << 30))  # GB, whole ones
        plan.dynamic_split_fuse = True
        plan.enable_prefix_caching = options["prefix_caching"]
        hints = {
            "INFERENCE_NUM_THREADS": options["threads"],
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": options["compute"],
        }
        if options["kv"]:
            hints["KV_CACHE_PRECISION"] = options["kv"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, plan, "CPU", hints)
        self._came: queue.SimpleQueue[tuple[Sequence[int], int, Stream]] = queue.SimpleQueue()
        self._open: dict[int, tuple[Any, int, Stream]] = {}
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: Sequence[int], max_tokens: int, stream: Stream) -> None:
        self._came.put((prompt, max_tokens, stream))

    def _run(self) -> None:
        while True:
            while not self._open or not self._came.empty():
                self._begin(*self._came.get())
            self._pipeline.step()
            for number in list(self._open):
                self._read(number)

    def _begin(self, prompt: Sequence[int], max_tokens: int, stream: Stream) -> None:
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = max_tokens
        wanted.ignore_eos = True
        wanted.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._count += 1
        handle = self._pipeline.add_request(self._count, ids, wanted)
        self._open[self._count] = (handle, len(prompt), stream)

    def _read(self, number: int) -> None:
        handle, prompt_tokens, stream = self._open[number]
        while handle.can_read():
            for output in handle.read().values():
                stream.put(output.generated_ids)
        if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
            stream.end(prompt_tokens)
            del self._open[number]


if __name__ == "__main__":
    serve(Pipeline(sys.argv[1], json.loads(sys.argv[3])), "openvino", int(sys.argv[2]))
