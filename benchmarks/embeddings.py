"""Embeddings: texts per second compared with transformers, and their effect on streams that decode meanwhile.

The encoder has the shape of all-MiniLM-L6-v2 and random weights in float32. Texts are random tokens whose number is
drawn from a lognormal distribution between 4 and 256. Both sides get tokens, sort them by length and pool the mean:

- transformers: ``BertModel`` with its default attention, batches of 32 padded to their longest, as
  sentence-transformers makes them.
- headrace: packed batches of up to 1024 tokens, as the server makes them while nothing generates.

``python -m benchmarks.embeddings throughput`` needs transformers. ``python -m benchmarks.embeddings latency`` decodes
eight streams with the built-in model, and measures the time between their steps in alternating rounds, with and
without a client that embeds texts with all-MiniLM-L6-v2 all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.embedding import InputQueue, TokenRow
from headrace.core.events import Emitted, Event
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.tenancy.gate import Limits
from headrace.service.embedding_worker import EmbeddingJob, EmbeddingWorker
from headrace.service.service import Service

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS = 30522, 384, 1536, 6, 12
PADDED_ROWS, PACKED_TOKENS = 32, 1024
STREAMS, STREAM_TOKENS = 8, 1000


def rows(count: int, seed: int) -> list[tuple[int, ...]]:
    """Texts as tokens, of lengths like those of sentences and short paragraphs."""
    drawn = random.Random(seed)
    lengths = [min(256, max(4, round(drawn.lognormvariate(3.4, 0.8)))) for _ in range(count)]
    return [tuple(drawn.randrange(1000, VOCABULARY) for _ in range(length)) for length in lengths]


def write_model(folder: Path) -> Any:
    """A model of transformers with random weights, saved for both."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    return model


def padded(model: Any, texts: list[tuple[int, ...]]) -> np.ndarray:
    """Vectors computed by transformers."""
    import torch

    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    out = np.empty((len(texts), HIDDEN), np.float32)
    with torch.inference_mode():
        for begin in range(0, len(order), PADDED_ROWS):
            batch = order[begin : begin + PADDED_ROWS]
            longest = len(texts[batch[0]])
            tokens, mask = (
                torch.zeros(len(batch), longest, dtype=torch.long),
                torch.zeros(len(batch), longest),
            )
            for row, index in enumerate(batch):
                tokens[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            hidden = model(tokens, attention_mask=mask.long()).last_hidden_state
            out[batch] = ((hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)).numpy()
    return out


def packed(model: Any, texts: list[tuple[int, ...]]) -> np.ndarray:
    """Vectors computed by Headrace, in the batches of its server."""
    from headrace.compute.encoder.models import run

    queue: InputQueue[str] = InputQueue()
    queue.add("", "", [len(text) for text in texts])
    out = np.empty((len(texts), HIDDEN), np.float32)
    while queue:
        batch = [index for _, index in queue.take(PACKED_TOKENS)]
        out[batch] = run(model.run([TokenRow(texts[index]) for index in batch]))
    return out


def throughput(count: int, rounds: int) -> None:
    """Print texts per second of both sides, alternating, and the median of the rounds' ratios."""
    import torch

    from headrace.compute.device import limit_threads
    from headrace.compute.encoder.families import parse_encoder_config
    from headrace.compute.encoder.folder import Sentence
    from headrace.compute.encoder.models import EmbeddingModel, read_encoder
    from headrace.compute.encoder.tensors import read_tensors
    from headrace.compute.kernels import select
    from headrace.compute.model.hub import read_config

    print(f"torch {torch.__version__}, {limit_threads()} threads")
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_model(Path(folder))
        spec = parse_encoder_config(read_config(Path(folder)))
        encoder, _ = read_encoder(spec, read_tensors(Path(folder)), select("auto", device), device)
    ours = EmbeddingModel("minilm", encoder, None, Sentence("mean", True), 256)  # type: ignore[arg-type]
    texts = rows(count, seed=1)
    print(f"{count} texts, {sum(map(len, texts))} tokens")
    difference = np.abs(padded(theirs, texts[:64]) - packed(ours, texts[:64])).max()
    print(f"largest difference {difference:.1e}")
    ratios = []
    for _ in range(rounds):
        wall, cpu = [], []
        for compute, model in ((padded, theirs), (packed, ours)):
            began, used = time.perf_counter(), time.process_time()
            compute(model, texts)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        ratios.append((wall[0] / wall[1], cpu[0] / cpu[1]))
        print(
            f"transformers {count / wall[0]:.0f} texts/s ({cpu[0]:.2f} s of CPU time), "
            f"headrace {count / wall[1]:.0f} texts/s ({cpu[1]:.2f} s)",
            flush=True,
        )
    for what, values in zip(("texts/s", "CPU time"), zip(*ratios, strict=True), strict=True):
        print(f"median ratio of {what} {statistics.median(values):.2f}")


class Gaps:
    """A watcher that records the time between the steps that emit tokens of a request."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: dict[str, float] = {}

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, Emitted):
            if event.request_id in self._last:
                self.seconds.append(now - self._last[event.request_id])
            self._last[event.request_id] = now


async def decode(service: Service, turn: int) -> None:
    """Decode all streams to their end."""
    params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)
    requests = [Request(f"{turn}-{index}", (1, 2, 3, index), params) for index in range(STREAMS)]
    answer = service.open(requests, interval=0)
    while not answer.exhausted:
        await answer.read()
    service.close(answer)


async def embed(
    service: Service, worker: EmbeddingWorker, model: Any, ended: asyncio.Event, size: int
) -> int:
    """Embed batches of texts until the streams have ended; returns the number of texts."""
    done = 0
    while not ended.is_set():
        given = [TokenRow(row) for row in rows(size, seed=done)]
        job = EmbeddingJob(f"embed-{done}", "a", "embed", model, given, service.now())
        worker.submit(job)
        waits = asyncio.create_task(ended.wait())
        finished, _ = await asyncio.wait([job.result, waits], return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        worker.end(job, FinishReason.STOP)
        done += size if job.result in finished else 0
    return done


async def measure(service: Service, worker: EmbeddingWorker, model: Any, rounds: int, size: int) -> None:
    """Alternate rounds with and without embeddings."""
    means: dict[bool, list[float]] = {False: [], True: []}
    service.start()
    for turn in range(2 * rounds + 1):
        gaps = Gaps()
        service.watch(gaps)
        loaded, ended = turn % 2 == 1, asyncio.Event()
        load = asyncio.create_task(embed(service, worker, model, ended, size)) if loaded else None
        busy, began = worker.busy_seconds, time.perf_counter()
        await decode(service, turn)
        seconds, busy = time.perf_counter() - began, worker.busy_seconds - busy
        ended.set()
        texts = 0 if load is None else await load
        ordered = [1e3 * gap for gap in sorted(gaps.seconds)]
        if turn:  # the first round warms up
            means[loaded].append(statistics.fmean(ordered))
            print(
                f"{'embedding' if loaded else 'alone    '}  mean {means[loaded][-1]:.2f} ms  "
                f"p50 {ordered[len(ordered) // 2]:.2f} ms  p99 {ordered[len(ordered) * 99 // 100]:.2f} ms  "
                f"{texts} texts, {busy:.2f} of {seconds:.1f} s",
                flush=True,
            )
    print(f"median of means {statistics.median(means[True]):.2f} / {statistics.median(means[False]):.2f} ms")


def latency(rounds: int, size: int, ratio: float) -> None:
    """Measure the engine of a server, and its embedding worker, in this process."""
    from headrace.config import options
    from headrace.wiring.embedding import load_pooling
    from headrace.wiring.model import load, warm_up

    given = options(
        {"model": "builtin", "embedding_model": "all-MiniLM-L6-v2", "kv_cache_memory_bytes": 256 << 20}
    )
    models, loaded = load_pooling(given), load(given)
    warm_up(loaded)
    limits = Limits(1024, 4_000_000)
    service = Service(loaded.engine, limits, interrupt=loaded.runner.bell)
    asyncio.run(measure(service, EmbeddingWorker(service, limits, ratio), models.embedding, rounds, size))
    service.stop()


def main() -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("throughput", "latency"))
    parser.add_argument("--texts", type=int, default=1000, help="texts of a round, or of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=0.2, help="--mixed-embedding-ratio")
    given = parser.parse_args()
    if given.what == "throughput":
        throughput(given.texts, given.rounds)
    else:
        latency(given.rounds, min(given.texts, 8), given.ratio)


if __name__ == "__main__":
    main()
