"""Embeddings: texts per second against transformers, and what they cost streams that decode meanwhile.

The encoder has the shape of all-MiniLM-L6-v2 and random weights in float32. Texts are random tokens whose number is
drawn from a lognormal distribution between 4 and 256. Both sides get tokens, sort them by length and pool the mean:

- transformers: ``BertModel`` with its default attention, batches of 32 padded to their longest, as
  sentence-transformers makes them.
- headrace: packed batches of up to 1024 tokens, as the server makes them while nothing generates.

``python benchmarks/embeddings.py throughput`` needs transformers. ``python benchmarks/embeddings.py latency`` starts a
server on the built-in model, decodes eight streams, and measures the time between their tokens with and without a
client that embeds all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS = 30522, 384, 1536, 6, 12
PADDED_ROWS, PACKED_TOKENS = 32, 1024
STREAMS, STREAM_TOKENS = 8, 400


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
    """Vectors by transformers."""
    import torch

    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    out = np.empty((len(texts), HIDDEN), np.float32)
    with torch.inference_mode():
        for begin in range(0, len(order), PADDED_ROWS):
            batch = order[begin : begin + PADDED_ROWS]
            longest = len(texts[batch[0]])
            tokens, mask = torch.zeros(len(batch), longest, dtype=torch.long), torch.zeros(len(batch), longest)
            for row, index in enumerate(batch):
                tokens[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            hidden = model(tokens, attention_mask=mask.long()).last_hidden_state
            out[batch] = ((hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)).numpy()
    return out


def packed(model: Any, texts: list[tuple[int, ...]]) -> np.ndarray:
    """Vectors by Headrace, in the batches that its server makes."""
    from headrace.compute.encoder.models import run
    from headrace.core.embedding import InputQueue, TokenRow

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


async def stream(client: httpx.AsyncClient, gaps: list[float]) -> None:
    """Decode one stream and note the times between its tokens."""
    body = {"prompt": "Once upon a time", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    last = None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def embed(client: httpx.AsyncClient, ended: asyncio.Event, size: int) -> int:
    """Embed batches of texts until the streams have ended; returns the number of texts."""
    done = 0
    while not ended.is_set():
        texts = [list(row) for row in rows(size, seed=done)]
        (await client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})).raise_for_status()
        done += size
    return done


async def measure(url: str, rounds: int, size: int) -> None:
    """Alternate rounds with and without embeddings."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for turn in range(2 * rounds + 1):
            gaps: list[float] = []
            loaded, ended = turn % 2 == 1, asyncio.Event()
            load = asyncio.create_task(embed(client, ended, size)) if loaded else None
            began = time.perf_counter()
            await asyncio.gather(*(stream(client, gaps) for _ in range(STREAMS)))
            seconds = time.perf_counter() - began
            ended.set()
            texts = 0 if load is None else await load
            gaps.sort()
            if turn:  # the first round warms up
                print(
                    f"{'embedding' if loaded else 'alone    '}  mean {1e3 * statistics.fmean(gaps):.2f} ms  "
                    f"p50 {1e3 * gaps[len(gaps) // 2]:.2f} ms  p99 {1e3 * gaps[len(gaps) * 99 // 100]:.2f} ms  "
                    f"largest {1e3 * gaps[-1]:.2f} ms  {texts} texts in {seconds:.1f} s"
                )


def latency(rounds: int, size: int, flags: list[str]) -> None:
    """Start a server and measure it."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--kv-cache-memory-bytes", "256MiB"]
    command += ["--embedding-model", "all-MiniLM-L6-v2", "--log-format", "json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(found for line in server.stdout if (found := json.loads(line).get("url")))
            asyncio.run(measure(url, rounds, size))
        finally:
            server.kill()


def main() -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "latency"))
    parser.add_argument("--texts", type=int, default=1000, help="texts of a round, or of a request")
    parser.add_argument("--rounds", type=int, default=5)
    given, flags = parser.parse_known_args()
    if given.what == "throughput":
        throughput(given.texts, given.rounds)
    else:
        latency(given.rounds, min(given.texts, 256), flags)


if __name__ == "__main__":
    main()
