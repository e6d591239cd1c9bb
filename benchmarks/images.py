"""Inter-token latency of text beside images: ``python -m benchmarks.images``.

24 clients stream text in a closed loop all the time. Short windows are measured in turn: alone, and beside 24 clients
with photos, each of which is new, or with texts as long as an image. The model has random weights in the shapes of
SmolLM2-135M and CLIP B/16. CPU time of other programs is shown, so that a disturbed window is seen.
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
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from benchmarks.peers.shapes import SHAPES
from benchmarks.stage import Server, arguments, say, server
from headrace.lab.bench.stats import percentile

WORDS = 4096
SIDE, PATCH = 224, 16
IMAGE_TOKENS = (SIDE // PATCH) ** 2
PHOTO = (1024, 768)
TEXT_WORDS, TEXT_OUTPUT, IMAGE_OUTPUT = 32, (96, 160), 16
DISTURBED = 0.1
"""Cores of other programs from which on a round does not count."""
RESAMPLES = 1000
ENCODER = "image_encoder_seconds_total"
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


class Window(NamedTuple):
    """What windows of a kind measured: gaps between tokens of the text, first tokens of the others, and CPU seconds.

    ``encoder_seconds`` are those of slices, which have all cores; ``images`` were encoded in them.
    """

    seconds: float
    gaps: list[float]
    first: list[float]
    images: float
    encoder_seconds: float
    server_seconds: float
    foreign_seconds: float

    def p(self, percent: float) -> float:
        """A percentile of the gaps, in milliseconds."""
        return 1000 * percentile(self.gaps, percent)

    def show(self, what: str) -> None:
        """Print it in a line."""
        tokens, images, encoder, server, foreign = (
            each / self.seconds
            for each in (
                *(len(self.gaps), self.images),
                *(self.encoder_seconds, self.server_seconds, self.foreign_seconds),
            )
        )
        late = f"; TTFT p50 {statistics.median(self.first):.2f} s" if self.first else ""
        late += f"; {images:.2f} images/s with {encoder:.0%} of all cores" if encoder else ""
        say(
            f"{what:>12}: p50 {self.p(50):.1f}, p90 {self.p(90):.1f}, p99 {self.p(99):.1f} ms, {tokens:.0f}"
            f" tokens/s{late}; CPU of the server {server:.2f}, of other programs {foreign:.2f} cores"
        )


def together(windows: Sequence[Window]) -> Window:
    """All windows of a kind as one."""
    return Window(*(sum(values, start=type(values[0])()) for values in zip(*windows, strict=True)))


class Load:
    """The clients of one server: the text streams all the time, and windows of it are measured."""

    def __init__(self, running: Server, given: argparse.Namespace) -> None:
        self._server = running
        self._given = given
        self._random = random.Random(given.seed)
        self._target = {"slo": {"tpot_ms": given.tpot_ms}} if given.tpot_ms else {}
        self._arrivals = list[tuple[float, float]]()  # of tokens, each with the one before
        self._count = max(1, int(given.rate * given.seconds))
        self._photos = [self._photo() for _ in range(self._count * (given.rounds + 1))]

    async def run(self) -> dict[str, list[Window]]:
        """The windows by what runs beside the text, in turn; each is printed."""
        given = self._given
        text = [asyncio.create_task(self._stream(number)) for number in range(given.clients)]
        found: dict[str, list[Window]] = {each: [] for each in ("", *given.beside)}
        try:
            await self._window("images")  # the first steps of a server are slow
            for _ in range(given.rounds):
                for beside, windows in found.items():
                    windows.append(await self._window(beside))
                    windows[-1].show(beside or "alone")
        finally:
            for each in text:
                each.cancel()
            await asyncio.wait(text)
        return found

    async def _stream(self, number: int) -> None:
        await asyncio.sleep(0.02 * number)  # so that prompts do not all start in the same step
        while True:
            before = 0.0
            async for at in self._ask(
                self._text(TEXT_WORDS, self._random.randint(*TEXT_OUTPUT), self._target)
            ):
                if before:
                    self._arrivals.append((before, at))
                before = at

    async def _window(self, beside: str) -> Window:
        """Measure until all that runs beside the text has been sent; then wait for its end."""
        given, first = self._given, list[float]()
        photos = [self._photos.pop() for _ in range(self._count)] if beside == "images" else []
        encoder = await self._encoder_seconds()
        self._arrivals.clear()
        cpu, began = self._cpu(), time.perf_counter()

        async def other(number: int) -> None:
            for turn in range(number, self._count, given.clients):
                await asyncio.sleep(max(0.0, began + turn / given.rate - time.perf_counter()))
                body = photos[turn] if photos else self._text(IMAGE_TOKENS)
                sent = time.perf_counter()
                times = [at async for at in self._ask(body)]
                first.append(times[0] - sent)

        others = [asyncio.create_task(other(each)) for each in range(given.clients) if beside]
        await asyncio.sleep(given.seconds)
        ended, used = time.perf_counter(), [b - a for a, b in zip(cpu, self._cpu(), strict=True)]
        gaps = [at - before for before, at in self._arrivals if began <= before and at <= ended]
        encoded = await self._encoder_seconds() - encoder
        await asyncio.gather(*others)
        share = encoded / (await self._encoder_seconds() - encoder) if photos else 0.0
        return Window(
            *(ended - began, gaps, first, self._count * share, encoded, used[1], used[0] - sum(used[1:]))
        )

    async def _encoder_seconds(self) -> float:
        return (await asyncio.to_thread(self._server.metrics))[ENCODER]

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

    async def _ask(self, body: bytes) -> AsyncIterator[float]:
        """When each token arrives. A client library would take as much CPU time as the server."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        head = f"Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        try:
            if b" 200 " not in await reader.readline():
                raise RuntimeError((await reader.read()).decode(errors="replace"))
            while chunk := await reader.read(1 << 16):
                if b'"content":"' in chunk:
                    yield time.perf_counter()
        finally:
            writer.close()

    def _cpu(self) -> tuple[float, ...]:
        """Seconds of CPU time: of the machine, of the server with the processes that it has ended, and of this one."""
        ticks = os.sysconf("SC_CLK_TCK")
        machine = [int(each) for each in Path("/proc/stat").read_text().split()[1:9]]
        process = Path(f"/proc/{self._server.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        busy = sum(machine) - sum(machine[3:5])  # without idle time
        return busy / ticks, sum(int(each) for each in process) / ticks, time.process_time()


def _undisturbed(found: dict[str, list[Window]]) -> dict[str, list[Window]]:
    """The rounds in which other programs took little CPU time; all of them if there is no such round."""
    rounds = list(zip(*found.values(), strict=True))
    quiet = [
        each for each in rounds if all(window.foreign_seconds < DISTURBED * window.seconds for window in each)
    ]
    say(f"{len(quiet)} of {len(rounds)} rounds were undisturbed" + ("" if quiet else ": all are compared"))
    return dict(zip(found, map(list, zip(*(quiet or rounds), strict=True)), strict=True))


def _interval(pairs: Sequence[tuple[Window, Window]]) -> tuple[float, float]:
    """The 95 % interval of the ratio of the 99th percentiles of all gaps: pairs of windows are resampled."""
    gaps = [(np.array(before.gaps), np.array(after.gaps)) for before, after in pairs]
    ratios, drawn = list[float](), np.random.default_rng(0)
    for _ in range(RESAMPLES):
        chosen = [gaps[each] for each in drawn.integers(len(gaps), size=len(gaps))]
        before, after = (np.percentile(np.concatenate(each), 99) for each in zip(*chosen, strict=True))
        ratios.append(float(after / before))
    return percentile(ratios, 2.5), percentile(ratios, 97.5)


def _compare(alone: Sequence[Window], beside: str, windows: Sequence[Window]) -> None:
    """Print the 99th percentile beside others over that alone: of all gaps, and of neighbouring windows."""
    ratios = [after.p(99) / before.p(99) for before, after in zip(alone, windows, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    least, most = _interval(list(zip(alone, windows, strict=True)))
    ratio = together(windows).p(99) / together(alone).p(99)
    say(
        f"p99 beside {beside} over alone: {ratio:.2f} of all gaps, 95 % interval {least:.2f} to {most:.2f}; of"
        f" {len(ratios)} pairs: median {median:.2f}, quartiles {low:.2f} and {high:.2f},"
        f" {min(ratios):.2f} to {max(ratios):.2f}"
    )


def main() -> None:
    """See the head of this file."""
    parser = arguments(__doc__ or "", device="cpu", rounds=12)
    parser.add_argument("--clients", type=int, default=24, help="clients of text, and as many others")
    parser.add_argument("--rate", type=float, default=1.0, help="prompts a second of the others together")
    parser.add_argument("--beside", nargs="+", choices=("text", "images"), default=["images"])
    parser.add_argument("--tpot-ms", type=float, default=0.0, help="target of the text (0: none)")
    parser.add_argument("--profile", default="balanced", help="profile of the server")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of each window")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        given.model = folder
        flags = ["--load-format", "dummy", "--max-model-len", "1024", "--kv-cache-memory-bytes", "512MiB"]
        flags += ["--profile", given.profile, "--max-num-seqs", str(2 * given.clients)]
        with server(given, *flags) as running:
            found = asyncio.run(Load(running, given).run())
    found = _undisturbed(found)
    for beside, windows in found.items():
        together(windows).show(f"all {beside or 'alone'}")
    for beside in given.beside:
        _compare(found[""], beside, found[beside])


if __name__ == "__main__":
    main()
