"""Inter-token latency of text beside images: ``python -m benchmarks.images``.

24 clients stream text in a closed loop: alone, beside 24 clients whose prompts are as long as an image, and beside 24
clients with photos, each of which is new. The model has random weights in the shapes of SmolLM2-135M and CLIP B/16.
CPU time of other programs is shown, so that a disturbed phase is seen.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from benchmarks.peers.shapes import SHAPES
from benchmarks.stage import arguments, say, server
from headrace.lab.bench.stats import percentile

WORDS = 4096
SIDE, PATCH = 224, 16
IMAGE_TOKENS = (SIDE // PATCH) ** 2
PHOTO = (1024, 768)
TEXT_WORDS, IMAGE_OUTPUT = 32, 16
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT: dict[str, Any] = SHAPES["smollm2-135m"].config() | {
    "vocab_size": WORDS,
    "max_position_embeddings": 2048,
}
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def write_model(folder: Path) -> None:
    """The configs and a tokenizer; weights are dummies."""
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_token_index": WORDS - 1,
        "text_config": TEXT,
        "tie_word_embeddings": True,
        "vision_config": VISION,
    }
    processor = {
        "image_processor_type": "LlavaImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
    }
    for name, content in (("config", config), ("preprocessor_config", processor)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    words = {f"w{each}": each for each in range(WORDS - 1)} | {"<image>": WORDS - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class Load:
    """The clients of one server."""

    def __init__(self, url: str, pid: int, given: argparse.Namespace) -> None:
        self._port = int(url.rpartition(":")[2])
        self._pid = pid
        self._given = given
        self._random = random.Random(given.seed)
        self._target = {"slo": {"tpot_ms": given.tpot_ms}} if given.tpot_ms else {}

    async def phase(self, beside: str) -> float:
        """The 99th percentile of the text's inter-token latency, in milliseconds; prints a line."""
        given, gaps, first = self._given, list[float](), list[float]()
        count = int(given.rate * given.seconds) if beside else 0
        bodies = [self._photo() if beside == "images" else self._text(IMAGE_TOKENS) for _ in range(count)]
        cpu, began = self._cpu(), time.perf_counter()
        until = began + given.seconds

        async def text(number: int) -> None:
            await asyncio.sleep(0.02 * number)  # so that prompts do not all start in the same step
            while time.perf_counter() < until:
                times = await self._ask(self._text(TEXT_WORDS, self._random.randint(96, 160), self._target))
                gaps.extend(after - before for before, after in pairwise(times))

        async def other(number: int) -> None:
            for turn in range(number, count, given.clients):
                await asyncio.sleep(max(0.0, began + turn / given.rate - time.perf_counter()))
                sent = time.perf_counter()
                first.append((await self._ask(bodies[turn]))[0] - sent)

        clients = range(given.clients)
        await asyncio.gather(*map(text, clients), *map(other, clients))
        wall, used = (
            time.perf_counter() - began,
            [after - before for before, after in zip(cpu, self._cpu(), strict=True)],
        )
        p50, p90, p99 = (1000 * percentile(gaps, percent) for percent in (50, 90, 99))
        late = f", their TTFT p50 {statistics.median(first):.2f} s" if first else ""
        say(
            f"{beside or 'alone':>7}: p50 {p50:.1f}, p90 {p90:.1f}, p99 {p99:.1f} ms of {len(gaps)} tokens{late}; in"
            f" {wall:.1f} s the server took {used[1]:.1f} s of CPU, other programs {used[0] - sum(used[1:]):.1f}"
        )
        return p99

    def _text(self, words: int, output: int = IMAGE_OUTPUT, more: Any = None) -> bytes:
        said = " ".join(f"w{self._random.randrange(WORDS - 1)}" for _ in range(words))
        return self._body(said, output, more or {})

    def _photo(self) -> bytes:
        width, height = PHOTO
        rough = np.frombuffer(self._random.randbytes(width * height * 3 // 256), np.uint8)
        file = io.BytesIO()
        Image.fromarray(rough.reshape(height // 16, width // 16, 3)).resize(PHOTO).save(
            file, "JPEG", quality=85
        )
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        return self._body([{"type": "image_url", "image_url": {"url": url}}], IMAGE_OUTPUT, {})

    def _body(self, content: Any, output: int, more: Any) -> bytes:
        said = [{"role": "user", "content": content}]
        body = {"messages": said, "max_tokens": output, "ignore_eos": True, "stream": True}
        return json.dumps(body | more).encode()

    async def _ask(self, body: bytes) -> list[float]:
        """When each token arrived. A client library would take as much CPU time as the server."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        if b" 200 " not in await reader.readline():
            raise RuntimeError((await reader.read()).decode(errors="replace"))
        times = []
        while chunk := await reader.read(1 << 16):
            if b'"content":"' in chunk:
                times.append(time.perf_counter())
        writer.close()
        return times

    def _cpu(self) -> tuple[float, ...]:
        """Seconds of CPU time: of the machine, of the server with the processes that it has ended, and of this one."""
        ticks = os.sysconf("SC_CLK_TCK")
        machine = [int(each) for each in Path("/proc/stat").read_text().split()[1:9]]
        process = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        busy = sum(machine) - sum(machine[3:5])  # without idle time
        return busy / ticks, sum(int(each) for each in process) / ticks, time.process_time()


def main() -> None:
    """See the head of this file."""
    parser = arguments(__doc__ or "", device="cpu")
    parser.add_argument("--clients", type=int, default=24, help="clients of text, and as many others")
    parser.add_argument("--rate", type=float, default=2.0, help="prompts a second of the others together")
    parser.add_argument("--tpot-ms", type=float, default=0.0, help="target of the text (0: none)")
    parser.add_argument("--profile", default="balanced", help="profile of the server")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each phase")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        given.model = folder
        flags = ["--load-format", "dummy", "--max-model-len", "1024", "--kv-cache-memory-bytes", "512MiB"]
        flags += ["--profile", given.profile, "--max-num-seqs", str(2 * given.clients)]
        with server(given, *flags) as running:
            load = Load(running.url, running.pid, given)

            def run(beside: str) -> float:
                return asyncio.run(load.phase(beside))

            run("images")  # the first steps of a server are slow
            found: dict[str, list[float]] = {"": [], "text": [], "images": []}
            for _ in range(given.rounds):
                for beside, values in found.items():
                    values.append(run(beside))
    alone, *others = map(statistics.median, found.values())
    say(
        "median p99 over that alone: "
        + ", ".join(
            f"{each / alone:.2f} beside {name}" for name, each in zip(("text", "images"), others, strict=True)
        )
    )


if __name__ == "__main__":
    main()
