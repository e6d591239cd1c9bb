"""Figures of a model on a GPU, beside the limit of the device and what the static model expects: for `gpu_check`.

Weights are random: speed depends on shapes. Each figure is kept in a file as soon as it is taken, so a run that ends
early is continued by the next one.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace import LLM, SamplingParams
from headrace.lab.plan.devices import device as device_of
from headrace.lab.plan.launches import GRAPHS, TORCH, TRITON, Kernels, expected
from headrace.lab.plan.roofline import KV_BYTES, WEIGHTS, Replica, chunk
from headrace.lab.plan.shapes import SHAPES, ModelShape

BUILTIN = ModelShape("builtin", 3, 256, 4, 2, 64, 768, 4096, tied_embeddings=True)


class Way(NamedTuple):
    """How a model is run: options of `LLM`, and what the static model is told of them."""

    options: dict[str, Any]
    kernels: Kernels = GRAPHS
    weights: str = "bfloat16"


WAYS = {
    "bf16": Way({"dtype": "bfloat16"}),
    "bf16, fp8 keys": Way({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "fp8, fp8 keys": Way({"quantization": "fp8", "kv_cache_dtype": "fp8"}, weights="int8"),
    "W4A16, int8 keys": Way({"quantization": "int4", "kv_cache_dtype": "int8"}, weights="int4"),
    "bf16, without graphs": Way({"dtype": "bfloat16", "enforce_eager": True}, TRITON),
    "bf16, torch": Way({"dtype": "bfloat16", "kernels": "torch"}, TORCH),
}


class Sizes(NamedTuple):
    """What is measured: decode steps of ``batches`` at ``contexts``, ``prompts``, and clients of a closed loop."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    prompts: tuple[int, ...]
    clients: tuple[int, ...]
    lengths: tuple[int, int]


ON_GPU = Sizes((1, 8, 64, 256), (128, 1024, 8192), 64, (2048, 8192), (32, 128, 256), (512, 128))
ON_CPU = Sizes((1, 3), (24,), 2, (40,), (2,), (16, 4))
"""Small enough to try the script."""

PORT = 18_437


class Figures:
    """Figures by name, kept in a file; no new one is begun after ``seconds``."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file = file
        self._end = time.monotonic() + seconds
        self.all: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def take(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure and keep a figure that is not there yet.

        Raises:
            SystemExit: the time is over (status 75); the figures so far are kept.
        """
        if name in self.all:
            return
        if time.monotonic() > self._end:
            raise SystemExit(75)
        self.all[name] = measure()
        self._file.write_text(json.dumps(self.all, indent=1) + "\n")
        print(name, self.all[name], flush=True)


def folder_of(name: str, folder: Path) -> str:
    """A folder with the configuration of a model and no weights; the built-in model is its own."""
    if name == "builtin":
        return name
    shape, path = SHAPES[name], folder / name
    path.mkdir(parents=True, exist_ok=True)
    kind = ("qwen3", "Qwen3ForCausalLM") if shape.qk_norm else ("llama", "LlamaForCausalLM")
    config = {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 16_384,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def options_of(name: str, way: str, device: str) -> dict[str, Any]:
    """Options with which a model is loaded, as keywords of `LLM`."""
    sizes = ON_GPU if device == "cuda" else ON_CPU
    given = {
        "device": device,
        "kernels": "triton" if device == "cuda" else "torch",
        "load_format": "dummy",
        "tokenizer": "builtin",
        "max_model_len": max(sizes.contexts + sizes.prompts) + sizes.steps + 16,
        "max_num_seqs": max(sizes.batches),
        **WAYS[way].options,
    }
    if name == "builtin":
        del given["load_format"], given["tokenizer"]
        given["kv_cache_memory_bytes"] = 64 << 20
    return given


def measure_model(name: str, way: str, device: str, folder: Path, figures: Figures) -> None:
    """Decode steps and prompts of a model, offline."""
    sizes = ON_GPU if device == "cuda" else ON_CPU
    began = time.perf_counter()
    llm = LLM(folder_of(name, folder), **options_of(name, way, device))
    ready = time.perf_counter() - began
    ledger = llm.loaded.ledger
    figures.take(f"{name}, {way}, start", lambda: {"seconds": ready, "graphs": ledger.graphs or "none"})
    room = ledger.num_blocks * ledger.block_size
    for context in sizes.contexts:
        for batch in sizes.batches:
            label = f"{name}, {way}, decode {batch} x {context}"
            if batch * (context + sizes.steps + 2 * ledger.block_size) > room:
                figures.take(label, lambda: {"left out": "the KV cache is too small"})
                continue
            figures.take(
                label,
                lambda batch=batch, context=context: _decode(llm, name, way, batch, context, sizes.steps),
            )
    for length in sizes.prompts:
        figures.take(
            f"{name}, {way}, prompt {length}", lambda length=length: _prefill(llm, name, way, length)
        )


def _prompts(count: int, length: int) -> list[list[int]]:
    """Random prompts, which have not been seen before."""
    drawn = random.SystemRandom()
    return [[drawn.randrange(3, 4000) for _ in range(length)] for _ in range(count)]


def _seconds(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params, progress=False)
    seconds = time.perf_counter() - began
    for output in outputs:
        if len(output.outputs[0].token_ids) != tokens:
            raise SystemExit(f"FAILED: {output.outputs[0]}")
    return seconds


def _decode(llm: LLM, name: str, way: str, batch: int, context: int, steps: int) -> dict[str, Any]:
    """A decode step: the difference of two runs over the same cached prompts."""
    prompts = _prompts(batch, context)
    _seconds(llm, prompts, 2)
    short = _seconds(llm, prompts, 2)
    step = (_seconds(llm, prompts, 2 + steps) - short) / steps
    replica, told = _replica(name, way), WAYS[way]
    quantization = told.options.get("quantization")
    model = expected(replica, told.kernels, batch, context, quantization)
    return {
        "ms": 1000 * step,
        "tokens/s": batch / step,
        "limit ms": 1000 * model.limit,
        "expected ms": 1000 * model.seconds,
        "share of limit": model.limit / step,
    }


def _prefill(llm: LLM, name: str, way: str, length: int) -> dict[str, Any]:
    """The shortest of three prompts that are not cached."""
    seconds = min(_seconds(llm, _prompts(1, length), 1) for _ in range(3))
    flops = _replica(name, way).flops(chunk(0, length, last=True))
    return {"ms": 1000 * seconds, "tokens/s": length / seconds, "TFLOP/s": flops / seconds / 1e12}


def _replica(name: str, way: str) -> Replica:
    told = WAYS[way]
    kv_bytes = KV_BYTES["int8" if told.options.get("kv_cache_dtype") else "bfloat16"]
    shape = BUILTIN if name == "builtin" else SHAPES[name]
    return Replica(shape, device_of("h200"), precision=WEIGHTS[told.weights]._replace(kv_bytes=kv_bytes))


def measure_loops(name: str, way: str, device: str, folder: Path, figures: Figures) -> None:
    """A closed loop of clients over HTTP, and the same requests offline."""
    sizes = ON_GPU if device == "cuda" else ON_CPU
    words = _words(options_of(name, way, device))
    model, program = folder_of(name, folder), [sys.executable, "-m", "headrace"]
    work = [
        "--dataset-name",
        "fixed",
        "--input-len",
        str(sizes.lengths[0]),
        "--output-len",
        str(sizes.lengths[1]),
    ]
    report = folder / "loop.json"
    folder.mkdir(parents=True, exist_ok=True)

    def figure(command: Sequence[str], requests: int) -> dict[str, Any]:
        given = [*command, *work, "--num-prompts", str(requests), "--output", str(report)]
        subprocess.run([*program, "bench", *given], check=True)
        summary = json.loads(report.read_text())["runs"][0]["summary"]
        return {key: value for key, value in summary.items() if isinstance(value, int | float)}

    most = max(sizes.clients)
    figures.take(f"{name}, {way}, offline", lambda: figure(["throughput", model, *words], 3 * most))
    left = [clients for clients in sizes.clients if f"{name}, {way}, {clients} clients" not in figures.all]
    if not left:
        return
    server = subprocess.Popen([*program, "serve", model, "--port", str(PORT), *words])
    try:
        _wait(server)
        base = ["serve", "--base-url", f"http://127.0.0.1:{PORT}", "--max-concurrency"]
        for clients in left:
            figures.take(
                f"{name}, {way}, {clients} clients",
                lambda clients=clients: figure([*base, str(clients)], 3 * clients),
            )
    finally:
        server.terminate()
        server.wait(30)


def _words(options: dict[str, Any]) -> list[str]:
    """Options as on the command line."""
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def _wait(server: subprocess.Popen[bytes]) -> None:
    """Until the server is ready.

    Raises:
        SystemExit: it ended, or is not ready within 90 seconds.
    """
    end = time.monotonic() + 90
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("FAILED: the server is not ready")


def table(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """All figures as lines of a table."""
    columns = ("ms", "limit ms", "expected ms", "share of limit", "tokens/s", "TFLOP/s")
    yield "| what | " + " | ".join(columns) + " | other |"
    yield "|---|" + "---:|" * len(columns) + "---|"
    for name, figure in figures.items():
        cells = [f"{figure[column]:,.3g}" if column in figure else "" for column in columns]
        rest = ", ".join(
            f"{key} {value if isinstance(value, str) else f'{value:,.4g}'}"
            for key, value in figure.items()
            if key not in columns
        )
        yield f"| {name} | {' | '.join(cells)} | {rest} |"
